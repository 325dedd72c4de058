"""What an adapter is belongs to the run that trains it: the folder it started from may change or go."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.engine.convert import convert_checkpoint
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config

TEXT = (
    "step_scheduler: {global_batch_size: 4, max_steps: 4, ckpt_every_steps: 2, val_every_steps: 4}\n"
    "checkpoint: {keep_best: false}\nlr_scheduler: {name: constant}\ndataloader: {batch_size: 2}\n"
)
FIRST = "peft={dim: 3, alpha: 8, use_rslora: true, dropout: 0.25, target_modules: [query, output.dense]}"


def started(folder, out, *settings, resume=False):
    finetune(load_run_config([folder / "run.yaml"], [*settings, f"checkpoint.checkpoint_dir={out}"]), resume=resume)
    return load_file(out / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that began with an adapter, uninterrupted: its folder, and what it ended with."""
    root = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMODEL_CACHE", str(root / "cache"))
        tiny.write_run(root)
        text = (root / "run.yaml").read_text().replace(f"checkpoint: {{checkpoint_dir: {root / 'out'}}}\n", "")
        (root / "run.yaml").write_text(text + TEXT)
        started(root, root / "first", FIRST)
        tensors = started(root, root / "whole", f"peft={{pretrained_adapter: {root / 'first'}}}")
    return root, tensors


@pytest.fixture
def halfway(whole, tmp_path, monkeypatch):
    """A copy of the run as it was after its second step, and of the adapter that it began with."""
    root, tensors = whole
    monkeypatch.setenv("AUTOMODEL_CACHE", str(root / "cache"))
    aside = root / "first.aside"
    shutil.copytree(root / "first", aside)
    out = tmp_path / "out"
    shutil.copytree(root / "whole", out)
    shutil.rmtree(out / "run" / "steps" / "step-00000004")
    for name in ("adapter_config.json", "adapter_model.safetensors", "run/summary.json"):
        (out / name).unlink()
    yield root, out, tensors
    shutil.rmtree(root / "first", ignore_errors=True)
    aside.rename(root / "first")


def change(folder):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 64, "use_rslora": False}))


@pytest.mark.parametrize("what", [change, shutil.rmtree])
def test_a_run_goes_on_with_its_adapter_whatever_became_of_the_one_it_began_with(halfway, tmp_path, what):
    root, out, tensors = halfway
    what(root / "first")
    convert_checkpoint(out, tmp_path / "converted")
    resumed = started(root, out, f"peft={{pretrained_adapter: {root / 'first'}}}", resume=True)
    assert all(torch.equal(tensors[name], resumed[name]) for name in tensors)
    for folder in (out, tmp_path / "converted"):
        assert (folder / "adapter_config.json").read_text() == (root / "whole" / "adapter_config.json").read_text()


@pytest.mark.slow
def test_two_ranks_go_on_without_the_folder_too(halfway):
    root, out, tensors = halfway
    shutil.rmtree(root / "first")
    settings = ["--resume", "--nproc-per-node", 2, "step_scheduler.max_steps=4"]
    tiny.automodel("finetune", "llm", "-c", out / "run" / "config.yaml", *settings, f"checkpoint.checkpoint_dir={out}")
    resumed = load_file(out / "adapter_model.safetensors")
    for name in tensors:  # dropout is drawn in another way
        torch.testing.assert_close(tensors[name], resumed[name], rtol=0, atol=5e-3)
    assert (out / "adapter_config.json").read_text() == (root / "whole" / "adapter_config.json").read_text()


@pytest.mark.parametrize("said", ["", ", dropout: 0.0"])
def test_a_run_of_an_earlier_version_goes_on_as_before_and_keeps_its_adapter_from_then_on(halfway, said):
    """Their configs have a dropout of 0, said or not, and what they used was the adapter's."""
    root, out, tensors = halfway
    (out / "run" / "adapter.json").unlink()
    config = out / "run" / "config.yaml"
    before = config.read_text()
    config.write_text(before.replace("peft:\n", "peft:\n  dropout: 0.0\n"))
    assert "  dropout: 0.0\n" in config.read_text()
    resumed = started(root, out, f"peft={{pretrained_adapter: {root / 'first'}{said}}}", resume=True)
    assert config.read_text() == before.replace(str(root / "whole"), str(out))
    assert all(torch.equal(tensors[name], resumed[name]) for name in tensors)
    kept = [json.loads((folder / "run" / "adapter.json").read_text()) for folder in (out, root / "whole")]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": None}, r"adapter\.json is damaged"),
        (
            {"ranks": {"nowhere": 3}, "alphas": {"nowhere": 8}},
            "'nowhere', which this model does not have",
        ),
    ],
)
def test_what_is_kept_must_fit(halfway, tmp_path, changes, message):
    _, out, _ = halfway
    path = out / "run" / "adapter.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        convert_checkpoint(out, tmp_path / "converted")
