"""Stacked adapters compute the sum of their updates; swapped ones what they compute alone."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from automodel.adapters.attach import attach, resolve, trained_tensors
from automodel.adapters.combine import stack_folders, swap
from automodel.adapters.config import PeftConfig
from automodel.adapters.peft_folder import resolve_folder, write_folder
from automodel.cli.export import app
from automodel.config.errors import UserError
from tiny_models import tiny

IDS = torch.randint(5, 90, (2, 11), generator=torch.Generator().manual_seed(0))
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def written(folder, seed, **section):
    """An adapter that is not zero, in a folder; (what it adds to the weights of each layer)."""
    _, model = tiny("llama", "causal-lm")
    attach(model, resolve(PeftConfig(**{"dim": 4, "alpha": 8, **section}), model, "CAUSAL_LM", "base"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in trained_tensors(model).values():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    folder.mkdir()
    write_folder(model, model._automodel_adapter, folder)
    layers = {name: model.get_submodule(name) for name in model._automodel_adapter.ranks}
    return {name: m.scale * (m.lora_B @ m.lora_A).detach() for name, m in layers.items()}


def logits_of(folder, added=None):
    _, model = tiny("llama", "causal-lm")
    if folder is not None:
        attach(model, resolve_folder(folder, model, "CAUSAL_LM", "base"))
    with torch.no_grad():
        for name, update in (added or {}).items():
            model.get_submodule(name).weight += update
        return model(input_ids=IDS).logits


def test_a_stack_is_the_sum(tmp_path):
    one = written(tmp_path / "one", 1)
    two = written(tmp_path / "two", 2, dim=2, target_modules=("q_proj", "down_proj"), use_rslora=True)
    assert stack_folders([str(tmp_path / "one"), f"{tmp_path / 'two'}=0.5"], tmp_path / "both") == 6
    total = {name: update + 0.5 * two[name] if name in two else update for name, update in one.items()}
    torch.testing.assert_close(logits_of(tmp_path / "both"), logits_of(None, total), **CLOSE)
    config = json.loads((tmp_path / "both" / "adapter_config.json").read_text())
    assert (config["r"], config["use_rslora"]) == (4, False)
    assert set(config["rank_pattern"].values()) == {6}


def test_swapped_numbers_are_the_other_adapters(tmp_path):
    written(tmp_path / "one", 1)
    written(tmp_path / "two", 2, alpha=16)
    _, model = tiny("llama", "causal-lm")
    adapters = [resolve_folder(tmp_path / name, model, "CAUSAL_LM", "base") for name in ("one", "two")]
    attach(model, adapters[0])
    with torch.no_grad():
        for adapter, name in ((adapters[1], "two"), (adapters[0], "one")):
            swap(model, adapter)
            torch.testing.assert_close(model(input_ids=IDS).logits, logits_of(tmp_path / name), **CLOSE)
    written(tmp_path / "other", 3, dim=2)
    _, fresh = tiny("llama", "causal-lm")
    with pytest.raises(UserError, match="or its rank is another"):
        swap(model, resolve_folder(tmp_path / "other", fresh, "CAUSAL_LM", "base"))


def test_the_command_and_what_it_refuses(tmp_path):
    written(tmp_path / "one", 1)
    written(tmp_path / "two", 2)
    written(tmp_path / "dora", 3, use_dora=True)
    runner = CliRunner()
    done = runner.invoke(app, [str(tmp_path / "one"), "--stack", str(tmp_path / "two"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "2 adapters as one" in done.output
    written(tmp_path / "r=8", 4)  # no weight: there is such a folder
    assert stack_folders([str(tmp_path / "one"), str(tmp_path / "r=8")], tmp_path / "named") > 0
    for wrong, message in (
        ([str(tmp_path / "one"), str(tmp_path / "dora")], "DoRA"),
        ([str(tmp_path / "one"), f"{tmp_path / 'two'}=much"], "is no number"),
    ):
        with pytest.raises(UserError, match=message):
            stack_folders(wrong, tmp_path / "new")
    with pytest.raises(UserError, match="not empty"):
        stack_folders([str(tmp_path / "one"), str(tmp_path / "two")], tmp_path / "out")
