"""Whole fused decoders with their Triton kernels, in the interpreter and in fp32: logits and gradients of stock
transformers, document by document. One model for each way through the kernels; all families run on the kernels'
references in `tests/parity/test_fused_decoders.py`, all on a GPU in `tests/gpu/test_fused_decoder.py`."""

import pytest

from automodel.models import fused_decoder_attention
from automodel.models.checkpointing import use_gradient_checkpointing
from automodel.models.recompute import use_own_checkpoints
from parity.test_fused_decoders import fused
from parity.test_packed_families import assert_same_logits_and_gradients, documents

PARTLY_TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "task", "overrides", "short"),
    [
        ("llama", "text-classification", {"pad_token_id": 2}, True),
        ("qwen3", "text-classification", {}, True),
        ("gemma3_text", "causal-lm", {}, True),
        ("gemma2", "text-classification", {"pad_token_id": 2}, True),
        ("phi3", "causal-lm", PARTLY_TURNED, True),
        ("olmo2", "text-classification", {}, True),
        ("qwen3", "causal-lm", {}, False),
        ("phi3", "causal-lm", PARTLY_TURNED, False),
    ],
    ids=[
        *("rotation in place", "head norms, pooled", "head norms", "capped scores", "partial rotation"),
        "wide norms",
        *("long documents, head norms", "long documents, partial rotation"),
    ],
)
def test_kernels_and_all(interpreter, monkeypatch, kind, task, overrides, short):
    """Long documents: queries, keys and values are taken apart for another attention."""
    if not short:
        monkeypatch.setattr(fused_decoder_attention, "SHORT", 0)
    ours, stock, forward = fused(kind, task, **overrides)
    assert_same_logits_and_gradients(ours, stock, forward, task, documents(0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("offload", [False, True])
def test_layers_that_are_computed_again(interpreter, kind, offload):
    """Without their last product (Llama), or with it, where a norm inside the block reads it (Gemma 3)."""
    ours, stock, forward = fused(kind, "causal-lm")
    ours.train()
    use_gradient_checkpointing(ours, "full")
    use_own_checkpoints(ours, offload)
    assert_same_logits_and_gradients(ours, stock, forward, "causal-lm", documents(0))
