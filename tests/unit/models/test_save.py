"""The saved folder is a plain Hugging Face folder, whenever the process is killed."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from automodel.models.forward import make_forward
from automodel.models.packed_attention import PACKED_ATTENTION
from automodel.models.save import finish_interrupted_save, save_hf_folder
from automodel.tasks.registry import task_named

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parents[2] / "tiny_models.py")
tiny_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_models)

TEXT = "text-classification"
IDS = torch.arange(5, 17)[None]


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>")


def model_with_seed(seed):
    labels = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    return tiny_models.tiny("bert", TEXT, seed=seed, **labels)[1]


def assert_holds(folder, model):
    """Stock transformers loads the folder as this model: weights to the bit, so logits but for the arithmetic, which on
    some processors depends on where weights lie in memory."""
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-7)


def test_stock_transformers_loads_the_folder_with_identical_logits(tmp_path, tokenizer):
    model = model_with_seed(0)
    make_forward(model, task_named(TEXT).head, "packed")
    save_hf_folder(model, tokenizer, tmp_path)
    assert_holds(tmp_path, model_with_seed(0))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good"}
    assert PACKED_ATTENTION not in (tmp_path / "config.json").read_text()
    assert model.config._attn_implementation == PACKED_ATTENTION  # training goes on packed
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_files_are_as_readable_as_any_other_new_file(tmp_path):
    save_hf_folder(model_with_seed(0), None, tmp_path / "out")
    (tmp_path / "ordinary").touch()
    expected = (tmp_path / "ordinary").stat().st_mode
    assert {p.stat().st_mode for p in (tmp_path / "out").iterdir()} == {expected}


def test_other_files_in_the_folder_stay(tmp_path, tokenizer):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    (tmp_path / "other.safetensors").write_text("mine")
    save_hf_folder(model_with_seed(0), tokenizer, tmp_path)
    save_hf_folder(model_with_seed(1), tokenizer, tmp_path)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}"
    assert (tmp_path / "other.safetensors").read_text() == "mine"
    assert_holds(tmp_path, model_with_seed(1))


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.parametrize("moment", range(9))
def test_a_kill_at_any_moment_leaves_the_old_model_or_the_new(tmp_path, tokenizer, monkeypatch, moment):
    """Every rename is a moment; from the first on (the staging folder is complete) the new model wins."""
    old, new = model_with_seed(0), model_with_seed(1)
    save_hf_folder(old, tokenizer, tmp_path)
    done = 0
    replace, rename = os.replace, Path.rename

    def counted(real):
        def call(*arguments):
            nonlocal done
            if done == moment:
                raise Killed
            done += 1
            return real(*arguments)

        return call

    monkeypatch.setattr(os, "replace", counted(replace))
    monkeypatch.setattr(Path, "rename", counted(rename))
    try:
        save_hf_folder(new, tokenizer, tmp_path)
        killed = False
    except Killed:
        killed = True
    monkeypatch.undo()
    assert killed == (moment < 5)  # one rename of the folder, four files
    finish_interrupted_save(tmp_path)
    assert_holds(tmp_path, old if moment == 0 else new)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_changing_between_one_file_and_shards_leaves_no_stale_weights(tmp_path, monkeypatch):
    small, large = model_with_seed(0), model_with_seed(1)
    save_hf_folder(small, None, tmp_path)
    sharded = type(large).save_pretrained
    monkeypatch.setattr(
        type(large), "save_pretrained", lambda self, folder: sharded(self, folder, max_shard_size="20KB")
    )
    save_hf_folder(large, None, tmp_path)
    monkeypatch.undo()
    assert not (tmp_path / "model.safetensors").exists()
    assert_holds(tmp_path, large)
    save_hf_folder(small, None, tmp_path)
    assert [p.name for p in tmp_path.glob("model*")] == ["model.safetensors"]
    assert_holds(tmp_path, small)


def test_a_killed_sharded_save_over_a_sharded_one_keeps_every_new_shard(tmp_path, monkeypatch):
    old, new = model_with_seed(0), model_with_seed(1)
    sharded = type(old).save_pretrained
    monkeypatch.setattr(type(old), "save_pretrained", lambda self, folder: sharded(self, folder, max_shard_size="20KB"))
    save_hf_folder(old, None, tmp_path)
    replace, calls = os.replace, []

    def killed_at_the_third(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise Killed
        return replace(*arguments)

    monkeypatch.setattr(os, "replace", killed_at_the_third)
    with pytest.raises(Killed):
        save_hf_folder(new, None, tmp_path)
    monkeypatch.setattr(os, "replace", replace)
    finish_interrupted_save(tmp_path)
    assert_holds(tmp_path, new)


def test_a_full_disk_gets_its_room_back_and_keeps_the_old_model(tmp_path, tokenizer, monkeypatch):
    """A half-written folder stayed, and the next try was told that it was not empty."""
    _, model = tiny_models.tiny("bert", "text-classification")
    save_hf_folder(model, tokenizer, tmp_path / "old")
    before = sorted(path.name for path in (tmp_path / "old").iterdir())
    monkeypatch.setattr(tokenizer, "save_pretrained", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    for place in ("old", "new"):
        with pytest.raises(OSError, match="No space left"):
            save_hf_folder(model, tokenizer, tmp_path / place)
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == before
    assert not (tmp_path / "new").exists()


def test_generation_settings_that_transformers_would_not_write_are_kept(tmp_path, tokenizer):
    """Published models have a temperature without sampling; a trained one must not get lost for that."""
    model = tiny_models.tiny("llama", "causal-lm")[1]
    config = model.generation_config
    config.temperature = 0.9
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path / "stock")
    save_hf_folder(model, tokenizer, tmp_path / "ours")
    assert json.loads((tmp_path / "ours/generation_config.json").read_text())["temperature"] == 0.9
    assert model.generation_config is config
