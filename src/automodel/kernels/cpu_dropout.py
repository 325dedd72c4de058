"""Dropout on the CPU, without the price of torch's random numbers.

`bernoulli_` draws one number after the other, on one thread, in 8 to 9 ns (torch 2.13, an Ice Lake). A step of MiniLM
over 16 reviews needs some 25 million of them, most for the weights of attention; without dropout it takes half the
time. Filling memory with bits from the same generator costs 5 ns for each 64 of them, and sixteen are enough to decide
on an element:

    kept  ⇔  bits ≥ t,  t = round(p · 2¹⁶);      y = x · kept / (1 − t / 2¹⁶)

The probability is p to within 8e-6, and the factor is that of the probability which was really used, so the mean is
exact. The bits come from torch's own generator: a restored state, a resumed run or a checkpointed layer draws the same
again. Only the CPU: on a GPU masks are computed where they are needed (`philox.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LEVELS = 1 << 16
_LOWEST = -(1 << 15)


def threshold(p: float) -> int:
    """Of 65,536 equally likely numbers, how many mean that an element is dropped."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability must be in [0, 1), got {p}")
    return min(round(p * LEVELS), LEVELS - 1)


def kept_scale(p: float) -> float:
    return LEVELS / (LEVELS - threshold(p))


def draw_kept(shape: Sequence[int], p: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Ones where an element is kept, and zeros, from torch's generator."""
    count = math.prod(shape)
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(_LOWEST << 48, None)
    kept = torch.empty(tuple(shape), dtype=dtype)
    # Straight into the wanted dtype: by way of booleans it takes four times as long.
    torch.ge(words.view(torch.int16)[:count], _LOWEST + threshold(p), out=kept.view(-1))
    return kept


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        factors = draw_kept(x.shape, p, x.dtype).mul_(kept_scale(p))
        ctx.save_for_backward(factors)
        return x * factors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        (factors,) = ctx.saved_tensors
        return dy * factors, None


def cpu_dropout(x: Tensor, p: float) -> Tensor:
    return _Dropout.apply(x, p) if p > 0.0 else x


class _Attention(torch.autograd.Function):
    """Documents of one length: (documents · heads, length, D) each. Scores are kept, as torch's own way keeps them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, p: float) -> Tensor:
        scores = torch.bmm(q * scale, k.transpose(1, 2))
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, -1)
        kept = draw_kept(weights.shape, p)
        ctx.save_for_backward(q, k, v, weights, kept)
        ctx.scale, ctx.p = scale, p
        return torch.bmm(torch.mul(weights, kept, out=scores), v).mul_(kept_scale(p))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor):
        q, k, v, weights, kept = ctx.saved_tensors
        dout = dout * kept_scale(ctx.p)
        used = weights * kept
        dv = torch.bmm(used.transpose(1, 2), dout)
        dweights = torch.bmm(dout, v.transpose(1, 2)).mul_(kept)
        dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
        dq = torch.bmm(dscores, k).mul_(ctx.scale)
        dk = torch.bmm(dscores.transpose(1, 2), q).mul_(ctx.scale)
        return dq, dk, dv, None, None, None


def attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, p: float) -> Tensor:
    """softmax(scale · q kᵀ), dropped with probability p, times v, for (documents, heads, length, D) in fp32. `hidden`:
    (length, length), true where a query may not look."""
    heads = (x.flatten(0, 1) for x in (q, k, v))
    return _Attention.apply(*heads, hidden, scale, p).unflatten(0, q.shape[:2])
