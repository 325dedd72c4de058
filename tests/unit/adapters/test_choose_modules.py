"""Where adapters stand: names, globs, `all-linear`, heads; and what is said where nothing fits."""

from __future__ import annotations

import pytest

import tiny_models
from automodel.adapters.attach import adapter_of, attach, count_trained, merge, resolve, trained_tensors
from automodel.adapters.choose import choose_saved, choose_targets, shortest_names
from automodel.adapters.config import PeftConfig
from automodel.config.errors import UserError
from automodel.tasks.registry import task_named


def targets(kind, task, asked, excluded=()):
    _, model = tiny_models.tiny(kind, task)
    return choose_targets(model, asked, excluded, choose_saved(model, task_named(task).head.adapter_type, ()))


@pytest.mark.parametrize(
    ("kind", "last_names"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("qwen3", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("gpt2", {"c_attn", "c_proj", "c_fc"}),
        ("t5", {"q", "k", "v", "o", "wi", "wo"}),
    ],
)
def test_all_linear_is_every_product_of_the_blocks(kind, last_names):
    task = "seq2seq" if kind == "t5" else "causal-lm"
    for asked in (None, "all-linear"):
        found = targets(kind, task, asked)
        assert {name.split(".")[-1] for name in found} == last_names
        assert not any("lm_head" in name for name in found)


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        ("bert", ("bert.pooler", "classifier")),
        ("distilbert", ("pre_classifier", "classifier")),
        ("roberta", ("classifier",)),
        ("modernbert", ("head", "classifier")),
        ("llama", ("score",)),
    ],
)
def test_heads_and_poolers_are_trained_in_full(kind, saved):
    _, model = tiny_models.tiny(kind, "text-classification")
    assert choose_saved(model, "SEQ_CLS", ()) == saved
    assert not any(name.startswith(saved) for name in choose_targets(model, None, (), saved))


def test_names_globs_and_exclusions():
    assert len(targets("llama", "causal-lm", ["q_proj", "v_proj"])) == 4
    assert len(targets("llama", "causal-lm", "*.mlp.*")) == 6
    assert targets("llama", "causal-lm", "*_proj", ["layers.0.*", "mlp.*"]) == tuple(
        f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"
    )
    assert len(targets("bert", "text-classification", ["output.dense"])) == 4


def test_one_text_may_be_a_regular_expression_for_whole_names():
    """As PEFT reads it. Names and globs come first, and entries of a list are those alone."""
    assert targets("llama", "causal-lm", r".*\.(q|v)_proj") == targets("llama", "causal-lm", ["q_proj", "v_proj"])
    assert targets("llama", "causal-lm", r"model\.layers\.[1-9]\..*(q|v)_proj", ["v_proj"]) == (
        "model.layers.1.self_attn.q_proj",
    )
    assert targets("llama", "causal-lm", "[qv]_proj") == targets("llama", "causal-lm", ["q_proj", "v_proj"])
    with pytest.raises(UserError, match="is called '.*_proj'"):
        targets("llama", "causal-lm", [r".*\.(q|v)_proj"])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("(q|v)_proj", r"One text is a name, a glob, or a regular expression for the whole name \(.*q_proj\)"),
        ("q_proj[", "One text is a name, a glob, or"),
        ("q_proj,v_proj", r"Give a list: \[q_proj, v_proj\]\."),
        ("q_proj v_proj", r"Give a list: \[q_proj, v_proj\]\."),
        (r".*\.embed_(tokens|words)", "'model.embed_tokens', a Embedding; adapters stand beside linear"),
    ],
)
def test_one_text_that_fits_nothing_is_told_how_it_is_read(asked, message):
    with pytest.raises(UserError, match=message):
        targets("llama", "causal-lm", asked)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"target_modules": ("q_porj",)}, "peft.target_modules: no module of the model is called 'q_porj'.*q_proj ×2"),
        ({"target_modules": "embed_tokens"}, "'model.embed_tokens', a Embedding; adapters stand beside linear"),
        ({"exclude_modules": ("query",)}, "peft.exclude_modules: no module of the model is called 'query'"),
        ({"exclude_modules": ("*_proj",)}, "leaves no module"),
        ({"target_modules": ()}, "peft.target_modules: is an empty list"),
        (
            {"target_modules": ("q_proj",), "modules_to_save": ("q_proj",)},
            "self_attn.q_proj', trained in full",
        ),
        ({"modules_to_save": ("classifier",)}, "peft.modules_to_save: no module of the model is called 'classifier'"),
    ],
)
def test_what_fits_nothing_is_an_error_that_lists_what_there_is(section, message):
    _, model = tiny_models.tiny("llama", "causal-lm")
    with pytest.raises(UserError, match=message):
        resolve(PeftConfig(**section), model, "CAUSAL_LM", "base")


def test_a_tied_table_is_not_trained_in_one_place_only():
    _, model = tiny_models.tiny("llama", "causal-lm", tie_word_embeddings=True)
    with pytest.raises(UserError, match="tied"):
        resolve(PeftConfig(modules_to_save=("embed_tokens",)), model, "CAUSAL_LM", "base")


def test_shortest_names_mean_the_chosen_modules_alone():
    every = ["bert.layer.0.output.dense", "bert.layer.1.output.dense", "bert.pooler.dense", "bert.layer.0.query"]
    chosen = [every[0], every[1], every[3]]
    assert shortest_names(chosen, every) == ["output.dense", "query"]
    assert shortest_names([every[0]], every) == ["0.output.dense"]


def test_attach_freezes_counts_and_merges_back():
    import torch

    _, model = tiny_models.tiny("bert", "text-classification", num_labels=3)
    adapter = resolve(PeftConfig(dim=4, alpha=8), model, "SEQ_CLS", "base")
    count = count_trained(adapter, model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    attach(model, adapter)
    trained = trained_tensors(model)
    assert sum(t.numel() for t in trained.values()) == count
    assert {n for n in trained if "lora" not in n} == {
        "bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias",
    }  # fmt: skip
    assert adapter_of(model) is adapter
    assert merge(model) == len(adapter.ranks)
    assert adapter_of(model) is None
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(before[n], after[n]) for n in before), "B is zero: nothing was added"
