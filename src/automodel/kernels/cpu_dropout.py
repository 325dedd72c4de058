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
