"""The switch to packed attention and back, what packs and what does not, and head dropout."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from automodel.data.batch import PackedBatch
from automodel.models.families import FAMILIES, packing_support
from automodel.models.forward import make_forward, stock_attention, use_packed_attention, use_stock_attention
from automodel.models.packed_attention import PACKED_ATTENTION
from automodel.models.task_head import NEXT_TOKEN, TOKENS
from automodel.tasks.registry import task_named

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parents[2] / "tiny_models.py")
tiny_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_models)

TEXT = "text-classification"


def batch(copies: int = 2, length: int = 6, last: bool = False, types: bool = False) -> PackedBatch:
    ids = torch.arange(5, 5 + length).repeat(copies)
    starts = torch.arange(copies) * length
    return PackedBatch(
        input_ids_T=ids,
        position_ids_T=torch.arange(length).repeat(copies),
        cu_seqlens_D=torch.arange(copies + 1, dtype=torch.int32) * length,
        max_seqlen=length,
        read_positions_R=starts + length - 1 if last else starts,
        labels_R=torch.zeros(copies, dtype=torch.long),
        token_type_ids_T=torch.zeros_like(ids) if types else None,
        num_documents=copies,
        num_tokens=len(ids),
        num_labels=copies,
    )


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_family_of_the_table_packs(kind):
    support = packing_support(tiny_models.tiny_config(kind), task_named(TEXT).head)
    assert support.packed
    assert support.pooling == ("last" if FAMILIES[kind].decoder else "first")
    assert packing_support(tiny_models.tiny_config(kind), TOKENS).pooling is None


@pytest.mark.parametrize(
    ("kind", "task", "overrides", "reason"),
    [
        ("t5", "seq2seq", {}, "t5 adds a relative position bias to attention"),
        ("bart", "seq2seq", {}, "bart is an encoder-decoder"),
        ("bart", TEXT, {}, "bart is an encoder-decoder"),
        ("deberta-v2", TEXT, {}, "disentangled attention"),
        ("mpnet", TEXT, {}, "relative position bias"),
        ("bert", "causal-lm", {}, "bert is a bidirectional encoder"),
        ("bert", TEXT, {"is_decoder": True}, "`is_decoder`"),
        ("llama", TEXT, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("llama", TEXT, {"is_causal": False}, "`is_causal: false`"),
        ("llama", "causal-lm", {"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "its own code"),
        ("gemma3_text", TEXT, {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping`"),
        ("gpt2", "causal-lm", {"add_cross_attention": True}, "`add_cross_attention`"),
        ("bert", TEXT, {"position_embedding_type": "relative_key"}, "`position_embedding_type: relative_key`"),
    ],
)
def test_what_cannot_be_packed_says_why(kind, task, overrides, reason):
    config = tiny_models.tiny_config(kind, **{k: v for k, v in overrides.items() if k != "is_causal"})
    if "is_causal" in overrides:
        config.is_causal = overrides["is_causal"]
    support = packing_support(config, task_named(task).head)
    assert not support.packed
    assert reason in support.reason


def test_documents_below_the_length_where_angles_change_can_be_packed():
    long = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}  # fmt: skip
    phi = tiny_models.tiny_config("phi3", rope_parameters=long, max_position_embeddings=131_072)
    assert packing_support(phi, NEXT_TOKEN, 4096).packed
    reason = "`rope_type: longrope`, which rescales with the longest document of a batch above 4,096 tokens"
    for longest in (None, 4097):
        support = packing_support(phi, NEXT_TOKEN, longest)
        assert not support.packed
        assert reason in support.reason
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    llama = tiny_models.tiny_config("llama", rope_parameters=dynamic, max_position_embeddings=64)
    assert packing_support(llama, NEXT_TOKEN, 64).packed
    assert not packing_support(llama, NEXT_TOKEN, 65).packed


def test_asking_for_the_impossible_path_is_an_error():
    _, model = tiny_models.tiny("deberta-v2", TEXT)
    with pytest.raises(ValueError, match="the packed path was asked for, but deberta-v2 has disentangled attention"):
        make_forward(model, task_named(TEXT).head, "packed")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_switch_goes_back_to_what_was_there(implementation):
    _, model = tiny_models.tiny("llama", "causal-lm")
    model.set_attn_implementation(implementation)
    use_packed_attention(model)
    use_packed_attention(model)  # twice is once
    assert model.config._attn_implementation == PACKED_ATTENTION
    use_stock_attention(model)
    assert model.config._attn_implementation == implementation


def test_generation_works_inside_stock_attention_and_is_refused_outside():
    _, model = tiny_models.tiny("llama", "causal-lm")
    prompt = torch.arange(5, 9)[None]
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    forward = make_forward(model, NEXT_TOKEN, "packed")
    with pytest.raises(RuntimeError, match="stock_attention"):
        model.generate(prompt, max_new_tokens=4, do_sample=False)
    with stock_attention(model):
        assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), expected)
    assert forward(batch()).shape == (2, tiny_models.VOCAB)


def test_other_instances_keep_their_attention():
    _, packed = tiny_models.tiny("bert", TEXT)
    _, other = tiny_models.tiny("bert", TEXT)
    make_forward(packed, task_named(TEXT).head, "packed")
    assert other.config._attn_implementation == "sdpa"


def test_token_types_a_model_does_not_take_are_an_error():
    _, model = tiny_models.tiny("distilbert", TEXT)
    with pytest.raises(
        ValueError, match="carries token types, which DistilBertForSequenceClassification does not take"
    ):
        make_forward(model, task_named(TEXT).head, "packed")(batch(types=True))


HEAD_DROPOUT = {
    "bert": {"classifier_dropout": 0.5},
    "distilbert": {"seq_classif_dropout": 0.5},
    "roberta": {"classifier_dropout": 0.5},
    "electra": {"classifier_dropout": 0.5},
    "albert": {"classifier_dropout_prob": 0.5},
    "modernbert": {"classifier_dropout": 0.5},
}


@pytest.mark.parametrize("kind", HEAD_DROPOUT)
def test_head_dropout_has_the_statistics_of_stock(kind):
    """The same document many times: only head dropout differs between copies, and its mean and spread are stock's."""
    _, model = tiny_models.tiny(kind, TEXT, **HEAD_DROPOUT[kind])
    model.train()
    copies = 3000
    torch.manual_seed(0)
    with torch.no_grad():
        theirs = model(input_ids=torch.arange(5, 11)[None].expand(copies, -1)).logits
        mine = make_forward(model, task_named(TEXT).head, "packed")(batch(copies))
    assert mine.std(0).min() > 1e-4  # dropout is on
    torch.testing.assert_close(mine.std(0), theirs.std(0), rtol=0.1, atol=0)
    tolerance = 5 * theirs.std(0).max().item() * (2 / copies) ** 0.5
    torch.testing.assert_close(mine.mean(0), theirs.mean(0), rtol=0, atol=tolerance)


def test_no_mask_is_built_and_no_packing_search_runs(monkeypatch):
    import transformers.masking_utils as masking

    def fail(*_, **__):
        raise AssertionError("transformers built a mask")

    monkeypatch.setattr(masking, "find_packed_sequence_indices", fail)
    monkeypatch.setattr(masking, "sdpa_mask", fail)
    for kind in ("mistral", "bert"):
        _, model = tiny_models.tiny(kind, TEXT, **({"sliding_window": 3} if kind == "mistral" else {}))
        make_forward(model, task_named(TEXT).head, "packed")(batch())
