"""Scores that saturate: the definition against transformers' own eager attention, by the way the model calls it, and
what context ranks cannot do with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from automodel.config.errors import UserError
from automodel.distributed.config import DistributedConfig
from automodel.distributed.layout import Layout, check_model
from automodel.models.packed_attention import packed_attention

LENGTHS = (9, 1, 14)
HEADS, KEYS, DIM, SCALE, CAP = 4, 2, 8, 0.6, 0.8


def eager(q, k, v, window):
    """Gemma 2's own function, for one document."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    module = nn.Module()
    module.num_key_value_groups = HEADS // KEYS
    far = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    hidden = (far < 0) | (far >= (window or q.shape[2]))
    mask = torch.zeros(far.shape).masked_fill(hidden, float("-inf"))[None, None]
    return eager_attention_forward(module, q, k, v, mask, scaling=SCALE, softcap=CAP)[0]


@pytest.mark.parametrize("window", [None, 5])
def test_the_stream_equals_each_document_alone(window):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, sum(LENGTHS), DIM, generator=generator, requires_grad=True) for n in (HEADS, KEYS, KEYS)
    )
    boundaries = torch.tensor([0, 9, 10, 24, 24], dtype=torch.int32)  # the last slot is empty
    out, _ = packed_attention(
        nn.Module(), q, k, v, None, scaling=SCALE, is_causal=True, sliding_window=window, softcap=CAP,
        cu_seq_lens_q=boundaries, max_length_q=16,
    )  # fmt: skip
    documents = zip(*(x.split(LENGTHS, dim=2) for x in (q, k, v)))
    alone = torch.cat([eager(*document, window) for document in documents], dim=1)
    torch.testing.assert_close(out, alone, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(out.shape, generator=generator)
    ours, theirs = (torch.autograd.grad(x, (q, k, v), upstream) for x in (out, alone))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_context_ranks_share_heads_or_do_without():
    config = SimpleNamespace(
        model_type="gemma2", num_attention_heads=8, num_key_value_heads=4, attn_logit_softcapping=50.0
    )
    check_model(DistributedConfig(cp_size=2), Layout(cp=2, fsdp=True), config, True)
    with pytest.raises(
        UserError, match="caps its attention scores, which is done only where ranks can share its heads"
    ):
        check_model(DistributedConfig(cp_size=3), Layout(cp=3, fsdp=True), config, True)
