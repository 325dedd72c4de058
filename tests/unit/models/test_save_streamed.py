"""A model written tensor by tensor is what `save_pretrained` writes."""

from __future__ import annotations

import pytest
import torch
import transformers as t
from safetensors.torch import load_file

import tiny_models
import tiny_runs as tiny
from automodel.models import save
from automodel.models.save import save_hf_folder
from automodel.models.save_streamed import held_by, write_streamed


@pytest.mark.parametrize("largest", [10**9, 10_000])
def test_any_tool_loads_it(tmp_path, largest):
    model = t.AutoModelForCausalLM.from_pretrained(
        tiny.make_model_folder(tmp_path / "model", "llama", tie_word_embeddings=True)
    )
    named = dict(model.named_parameters())
    write_streamed(
        model, {n: p.nbytes for n, p in named.items()}, ((n, p.detach()) for n, p in named.items()), tmp_path, largest
    )
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 3) == (largest == 10_000)
    loaded = t.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, named[n]) for n, p in loaded.named_parameters())


def test_the_folder_is_that_of_the_plain_way(tmp_path):
    model = t.AutoModelForCausalLM.from_pretrained(tiny.make_model_folder(tmp_path / "model", "llama"))
    named = dict(model.named_parameters())
    plain = save_hf_folder(model, None, tmp_path / "plain")
    parts = {n: p.nbytes for n, p in named.items()}, ((n, p.detach()) for n, p in named.items())
    streamed = save_hf_folder(model, None, tmp_path / "streamed", parts)
    names = sorted(path.name for path in plain.iterdir())
    assert names == sorted(path.name for path in streamed.iterdir())
    assert (plain / "config.json").read_text() == (streamed / "config.json").read_text()
    wanted, got = load_file(plain / "model.safetensors"), load_file(streamed / "model.safetensors")
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


def tasks_of(kind: str) -> list[str]:
    classes = {
        "text-classification": t.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        "causal-lm": t.MODEL_FOR_CAUSAL_LM_MAPPING,
    }
    return [task for task, known in classes.items() if type(tiny_models.tiny_config(kind)) in known]


@pytest.mark.parametrize("kind", sorted(tiny_models.SETTINGS))
def test_what_a_gpu_holds_is_written_as_the_plain_way_writes_it(tmp_path, kind):
    """Names, also where tensors are shared; the device is the CPU here, whose models are saved the plain way."""
    for task in tasks_of(kind):
        model = tiny_models.tiny(kind, task)[1]
        if save._changes_form(model):
            continue  # the plain way it is
        held = held_by("cpu", model)
        assert held is not None
        plain = save_hf_folder(model, None, tmp_path / f"{task}-plain")
        streamed = save_hf_folder(model, None, tmp_path / f"{task}-streamed", held)
        wanted, got = load_file(plain / "model.safetensors"), load_file(streamed / "model.safetensors")
        assert wanted.keys() == got.keys()
        assert all(torch.equal(wanted[name], got[name]) for name in wanted)
        assert (plain / "config.json").read_text() == (streamed / "config.json").read_text()


def test_what_is_not_plain_is_saved_by_transformers(monkeypatch):
    """Sharing that is not declared, of which transformers says that it would be lost; a form of saving of its own."""

    def fresh():
        return tiny_models.tiny("llama", "causal-lm", tie_word_embeddings=False)[1]

    model = fresh()
    model.lm_head.weight = model.model.embed_tokens.weight
    assert held_by("cpu", model) is None
    model = fresh()
    model.register_state_dict_post_hook(lambda _model, state, *_: state.update(more=torch.ones(2)))
    assert held_by("cpu", model) is None
    model = fresh()
    model.register_state_dict_post_hook(
        lambda _model, state, *_: state.update({"lm_head.weight": state["lm_head.weight"] * 2})
    )
    assert held_by("cpu", model) is None
    model = fresh()
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
    assert held_by("cpu", model) is None
    model = fresh()
    assert held_by("cpu", model) is not None
    for own in ("save_pretrained", "state_dict"):
        with monkeypatch.context() as patch:
            patch.setattr(type(model), own, lambda _model: {})
            assert held_by("cpu", model) is None


def test_a_model_that_changes_its_form_is_found_by_any_of_its_names(monkeypatch):
    """The family, the class of the whole, or that of a model inside."""
    model = tiny_models.tiny("llama", "causal-lm")[1]
    for kind, known in (("LlamaForCausalLM", True), ("LlamaModel", True), ("llama", True), ("LlamaConfig", False)):
        monkeypatch.setattr(save, "converts", kind.__eq__)
        assert save._changes_form(model) is known, kind


def test_nothing_is_held_in_parts(tmp_path):
    model = tiny_models.tiny("bert", "text-classification")[1]
    assert held_by("cuda", model) is None
    model.bert.embeddings.word_embeddings.to("meta")
    assert held_by("cpu", model) is None
