"""Packed attention against attention over the whole stream with a block-diagonal mask, written out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from automodel.models import packed_attention as room
from automodel.models.packed_attention import packed_attention, packed_attention_reference

BOUNDARIES = [0, 4, 8, 15, 16, 16]
TOKENS = 16


def dense(query, key, value, causal, window, scale):
    """Softmax over everything a query may see, in the plainest way."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    document = torch.bucketize(torch.arange(TOKENS), torch.tensor(BOUNDARIES[1:]), right=True)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None]
    allowed = document[:, None] == document[None]
    if causal:
        allowed &= distance >= 0
    if window:
        allowed &= distance.abs() < window
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def inputs(heads=4, kv_heads=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, "q"), (kv_heads, "k"), (kv_heads, "v"))
    return [torch.randn(1, n, TOKENS, 8, generator=generator, dtype=dtype).requires_grad_() for n, _ in shapes]


def module(causal):
    result = nn.Module()
    result.is_causal = causal
    return result


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_forward_and_backward_equal_the_dense_mask(causal, window, kv_heads):
    tensors = inputs(kv_heads=kv_heads)
    mine, weights = packed_attention(
        module(causal),
        *tensors,
        None,
        scaling=0.3,
        sliding_window=window,
        cu_seq_lens_q=torch.tensor(BOUNDARIES, dtype=torch.int32),
        max_length_q=7,
    )
    theirs = dense(*tensors, causal, window, 0.3)
    assert weights is None
    torch.testing.assert_close(mine, theirs)
    upstream = torch.randn(mine.shape, dtype=mine.dtype, generator=torch.Generator().manual_seed(1))
    for a, b in zip(torch.autograd.grad(mine, tensors, upstream), torch.autograd.grad(theirs, tensors, upstream)):
        torch.testing.assert_close(a, b)


def test_neighbours_of_equal_length_share_a_call(monkeypatch):
    calls = []
    real = room.F.scaled_dot_product_attention

    def spy(query, *arguments, **keywords):
        calls.append(tuple(query.shape))
        return real(query, *arguments, **keywords)

    monkeypatch.setattr(room.F, "scaled_dot_product_attention", spy)
    packed_attention_reference(*inputs(), BOUNDARIES, True, None, 1.0, 0.0)
    assert calls == [(2, 4, 4, 8), (1, 4, 7, 8), (1, 4, 1, 8)]


def test_dropout_keeps_the_mean_and_follows_the_seed():
    query, key, value = inputs(dtype=torch.float32)
    arguments = (BOUNDARIES, False, None, 0.3)
    plain = packed_attention_reference(query, key, value, *arguments, 0.0)
    torch.manual_seed(0)
    samples = torch.stack([packed_attention_reference(query, key, value, *arguments, 0.5) for _ in range(600)])
    torch.manual_seed(0)
    again = packed_attention_reference(query, key, value, *arguments, 0.5)
    assert torch.equal(samples[0], again)
    assert not torch.allclose(samples[0], plain)
    torch.testing.assert_close(samples.mean(0), plain, atol=0.25, rtol=0)


def test_autocast_decides_the_dtype_of_all_three():
    query, key, value = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = packed_attention(
            module(True),
            query,
            key,
            value.bfloat16(),
            None,
            cu_seq_lens_q=torch.tensor(BOUNDARIES, dtype=torch.int32),
            max_length_q=7,
        )
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({}, RuntimeError, r"called without document boundaries.*stock_attention"),
        ({"s_aux": torch.zeros(4)}, NotImplementedError, "'s_aux'"),
        ({"position_bias": torch.zeros(1)}, NotImplementedError, "'position_bias'"),
    ],
)
def test_what_it_cannot_do_exactly_is_refused(keywords, error, message):
    boundaries = {"cu_seq_lens_q": torch.tensor(BOUNDARIES, dtype=torch.int32), "max_length_q": 7} if keywords else {}
    with pytest.raises(error, match=message):
        packed_attention(module(True), *inputs(), None, **boundaries, **keywords)
