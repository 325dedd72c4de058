"""Whole small runs with adapters in their other forms: QLoRA packed and resident, DoRA, LoRA+, what the plan says."""

from __future__ import annotations

import json

import pytest
import torch

import tiny_runs as tiny
from automodel.adapters.config import PeftConfig
from automodel.config.errors import ConfigError, UserError
from automodel.engine.prepare import prepare_run
from automodel.engine.run import finetune
from automodel.optim.build import build_optimizer, parameter_groups, set_lr
from automodel.optim.config import OptimizerConfig
from automodel.plan.check import load_run_config

STEPS = "peft: {dim: 4}\nstep_scheduler: {max_steps: 6, log_every_steps: 1}\nvalidation_dataset: null\n"
FOUR_BITS = "quantization={load_in_4bit: true, bnb_4bit_use_double_quant: true}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapted")
    tiny.write_run(root, kind="llama", text=STEPS.replace("validation_dataset: null\n", ""))
    return root


@pytest.fixture
def run(folder, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))

    def start(name, *settings):
        out = folder / name
        finetune(load_run_config([folder / "run.yaml"], [*settings, f"checkpoint.checkpoint_dir={out}"]))
        plan = {d["name"]: d for d in json.loads((out / "run" / "plan.json").read_text())["decisions"]}
        return tiny.losses(out), plan, json.loads((out / "adapter_config.json").read_text())

    return start


def test_qlora_learns_and_a_resident_base_computes_the_same(run):
    kept, plan, _ = run("resident", FOUR_BITS)
    assert plan["base"]["value"] == "fp32, expanded from NF4, doubly quantised"
    assert "expanded once to fp32 and kept" in plan["base"]["reason"]
    packed, plan, config = run("packed", FOUR_BITS, "quantization.resident=false")
    assert "expanded to fp32 for each product; quantization.resident is false" in plan["base"]["reason"]
    assert kept == pytest.approx(packed, abs=1e-5)
    whole, _, _ = run("whole")
    assert 1e-6 < abs(whole[1] - kept[1]) < 0.1  # rounded weights are not the weights
    assert packed[6] < packed[1]
    assert config["peft_type"] == "LORA"


def test_a_base_that_was_replaced_is_said_when_its_adapter_is_asked(run, folder, caplog):
    """A folder that a later run wrote to: the adapter answered beside other weights without a word."""
    from safetensors.torch import load_file, save_file

    from automodel.engine.saved import open_saved

    base = tiny.make_model_folder(folder / "other", "llama")
    run("over-other", f"model={base}")
    open_saved(folder / "over-other").load("cpu")
    assert not caplog.messages
    weights = base / "model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    open_saved(folder / "over-other").load("cpu")
    assert "were replaced since the adapter" in caplog.text


@pytest.mark.parametrize("section", ["peft=null", "peft={dim: 2}"])
def test_an_adapter_is_no_model_to_train(folder, monkeypatch, section):
    """Said before the data is read, and with what to write instead."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
    adapter = folder / "an-adapter"
    adapter.mkdir(exist_ok=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/base"}))
    settings = [f"model={adapter}", section, "task=causal-lm", f"checkpoint.checkpoint_dir={folder}/never"]
    with pytest.raises(UserError, match=r"holds an adapter. Name its base there \(a/base\)"):
        finetune(load_run_config([folder / "run.yaml"], settings))


def test_eight_bits_are_nearer_than_four(run):
    whole, _, _ = run("whole-again")
    eight, plan, _ = run("eight", "quantization={load_in_8bit: true}")
    four, _, _ = run("four", "quantization={load_in_4bit: true}")
    assert plan["base"]["value"] == "fp32, expanded from 8 bits"
    assert abs(eight[1] - whole[1]) < abs(four[1] - whole[1])


def test_dora_and_lora_plus(run, folder, capsys):
    losses, plan, config = run("dora", "peft.use_dora=true", "peft.loraplus_lr_ratio=4")
    assert plan["adapter"]["value"].startswith("DoRA, ")
    assert "B learns 4 times as fast" in plan["adapter"]["reason"]
    assert config["use_dora"] is True
    said = " ".join(capsys.readouterr().out.split())
    assert "transformers' own from_pretrained draws a DoRA adapter's lengths anew" in said
    assert losses[6] < losses[1]
    plain, _, _ = run("plain")
    assert losses[1] == pytest.approx(plain[1], abs=1e-5)  # it begins as the model it stands beside
    assert losses[6] != plain[6]


def test_b_has_its_own_learning_rate():
    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lora_A, self.lora_B = torch.nn.Parameter(torch.ones(2, 4)), torch.nn.Parameter(torch.ones(4, 2))

    model, cfg = Adapted(), OptimizerConfig(lr=1e-3)
    assert len(parameter_groups(model, cfg)) == 1
    groups = parameter_groups(model, cfg, 16.0)
    assert [g["params"][0].shape for g in groups] == [(2, 4), (4, 2)]
    assert groups[1]["lr"] == pytest.approx(16e-3)
    optimizer = build_optimizer(model, cfg, adapter_b_ratio=16.0)
    set_lr(optimizer, 5e-4)
    assert [float(g["lr"]) for g in optimizer.param_groups] == pytest.approx([5e-4, 8e-3])


def test_what_cannot_be(folder, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
    with pytest.raises(ConfigError, match="cannot be trained. Add `peft:`"):
        load_run_config([folder / "run.yaml"], [FOUR_BITS, "peft=null"])
    with pytest.raises(UserError, match="another form of the frozen weights than fp8"):
        finetune(load_run_config([folder / "run.yaml"], [FOUR_BITS, "fp8={}", f"checkpoint.checkpoint_dir={folder}/x"]))
    assert PeftConfig().use_dora is False


def test_what_model_changes_of_the_base_counts_when_its_adapter_is_asked(run, folder):
    """An adapter of a language model is saved without a config, and beside rotations of another base it would answer
    otherwise."""
    from automodel.engine.assess import assess
    from automodel.engine.convert import convert_checkpoint
    from automodel.engine.saved import open_saved

    _, plan, _ = run(
        "rotated", "task=causal-lm", "model.rope_parameters={rope_type: default, rope_theta: 20.0}", "optimizer.lr=0.1"
    )
    assert not (folder / "rotated" / "config.json").exists()
    (measured,) = (value for step, value in tiny.losses(folder / "rotated", "validation").items() if step == 6)
    assert assess(folder / "rotated").metrics.values["loss"] == pytest.approx(measured, abs=1e-5)
    assert "does not hold changes of the base's config (rope_parameters)" in plan["adapter"]["reason"]
    convert_checkpoint(folder / "rotated", folder / "converted")
    for settings in ([], ["dataset.path=x.jsonl"]):
        assert open_saved(folder / "converted", settings=settings).hf_config.rope_parameters["rope_theta"] == 20.0


def test_what_cut_matrices_cannot_have_is_refused_of_an_adapter_that_is_started_from_too(run, folder):
    """The config does not say it: its own folder does."""
    run("dropped", "peft={dim: 4, dropout: 0.25}")
    settings = ["distributed={strategy: fsdp2, tp_size: 2}", f"peft={{pretrained_adapter: {folder / 'dropped'}}}"]
    with pytest.raises(UserError, match=r"peft\.dropout: the adapter .* has 0\.25, which .* \(tp_size\)"):
        prepare_run(load_run_config([folder / "run.yaml"], settings), planned_ranks=2)
    prepare_run(load_run_config([folder / "run.yaml"], [*settings, "peft.dropout=0"]), planned_ranks=2)
