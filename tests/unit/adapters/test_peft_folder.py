"""Adapter folders without the PEFT library: written, read again, and refused where something does not fit."""

from __future__ import annotations

import json

import pytest
import torch

import tiny_models
from automodel.adapters.attach import adapter_of, attach, resolve, trained_tensors
from automodel.adapters.config import PeftConfig
from automodel.adapters.peft_folder import read_tensors, resolve_folder, resolve_start, write_folder
from automodel.config.errors import NotYetError, UserError
from automodel.tasks.registry import task_named

TASK = "text-classification"


@pytest.fixture
def folder(tmp_path):
    _, model = tiny_models.tiny("bert", TASK, num_labels=3)
    attach(model, resolve(PeftConfig(dim=4, alpha=8), model, task_named(TASK).head.adapter_type, "base"))
    adapter = adapter_of(model)
    assert adapter is not None
    write_folder(model, adapter, tmp_path)
    return tmp_path


def change(folder, **keys):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def read(folder, **overrides):
    _, model = tiny_models.tiny("bert", TASK, **{"num_labels": 3, **overrides})
    return model, resolve_folder(folder, model, task_named(TASK).head.adapter_type, "base")


def test_what_is_read_is_what_was_written(folder):
    model, adapter = read(folder)
    assert adapter.saved == ("bert.pooler", "classifier")
    assert set(adapter.ranks.values()) == {4}
    assert adapter.scale("bert.encoder.layer.0.output.dense") == 2.0
    attach(model, adapter)
    tensors = read_tensors(folder)
    for name, tensor in trained_tensors(model).items():
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is IA3; only LORA"),
        ({"bias": "all"}, "`bias: all` is not built yet"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(folder, keys, message):
    change(folder, **keys)
    with pytest.raises(NotYetError, match=message):
        read(folder)


def test_other_classes_and_other_models_do_not_fit(folder):
    with pytest.raises(UserError, match=r"'classifier.bias' of shape \(3,\), but the model's is \(2,\)"):
        read(folder, num_labels=2)
    _, other = tiny_models.tiny("distilbert", TASK, num_labels=3)
    with pytest.raises(UserError, match="which is no linear layer here"):
        resolve_folder(folder, other, task_named(TASK).head.adapter_type, "base")
    with pytest.raises(UserError, match="holds no adapter_config.json"):
        resolve_folder(folder / "nowhere", other, task_named(TASK).head.adapter_type, "base")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"dim": 16}, "peft.dim: is 16, but the adapter in .* has 4"),
        ({"target_modules": "all-linear"}, "peft.target_modules: the modules are those of pretrained_adapter"),
        ({"use_rslora": True}, "peft.use_rslora"),
    ],
)
def test_a_section_must_agree_with_the_adapter_it_starts_from(folder, section, message):
    _, model = tiny_models.tiny("bert", TASK, num_labels=3)
    with pytest.raises(UserError, match=message):
        resolve_start(
            PeftConfig(pretrained_adapter=str(folder), **section), model, task_named(TASK).head.adapter_type, "base"
        )


def test_an_adapter_of_another_base_is_said(folder):
    """Shapes may fit a model that it was never trained beside."""
    _, model = tiny_models.tiny("bert", TASK, num_labels=3)
    section = PeftConfig(pretrained_adapter=str(folder))
    own = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert "another model" not in resolve_start(section, model, task_named(TASK).head.adapter_type, own).in_words()
    words = resolve_start(section, model, task_named(TASK).head.adapter_type, "somebody/else").in_words()
    assert words.endswith(f"; it was trained beside another model so far, {own}")


@pytest.mark.parametrize(("said", "holds"), [(None, 0.25), (0.0, 0.0), (0.5, 0.5)])
def test_the_dropout_that_is_said_holds_and_otherwise_the_adapter_s_own(folder, said, holds):
    change(folder, lora_dropout=0.25)
    _, model = tiny_models.tiny("bert", TASK, num_labels=3)
    adapter = resolve_start(
        PeftConfig(pretrained_adapter=str(folder), dropout=said), model, task_named(TASK).head.adapter_type, "base"
    )
    assert adapter.dropout == holds
    assert (f", dropout {holds:g}" in adapter.in_words()) == bool(holds)
    assert resolve(PeftConfig(dropout=said), model, task_named(TASK).head.adapter_type, "base").dropout == (said or 0.0)
