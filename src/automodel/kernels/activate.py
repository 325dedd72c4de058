"""Bias, activation and dropout of a classifier's head in one pass.

    y = dropout(f(x + bias))            f: relu, tanh, gelu (exact) or none

The head sees one row a document, so every launch costs more than its work; torch makes three forward and four backward.
Stored for the backward pass: x. The mask is computed again (`philox.py`).

Shapes: R rows, N width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.add_norm import WIDEST, forward_launch
from automodel.kernels.column_sum import rows_sum
from automodel.kernels.dispatch import runs_triton
from automodel.kernels.philox import drop_threshold, keep_mask
from automodel.kernels.side_stream import SideStream, gradients_by

FUNCTIONS = {"none": lambda x: x, "relu": F.relu, "tanh": torch.tanh, "gelu": F.gelu}


class Dropout(NamedTuple):
    """seed: one int64 on the device, advanced between a backward pass and the next forward pass; None drops nothing."""

    p: float = 0.0
    seed: Tensor | None = None
    site: int = 0


def activate_reference(x_RN: Tensor, bias: Tensor | None, function: str, dropout: Dropout) -> Tensor:
    y_RN = FUNCTIONS[function](x_RN if bias is None else x_RN + bias)
    if dropout.seed is None:
        return y_RN
    keep = keep_mask(dropout.seed, dropout.site, *x_RN.shape, dropout.p)
    return torch.where(keep, y_RN / (1.0 - dropout.p), torch.zeros((), dtype=y_RN.dtype, device=y_RN.device))


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RN: Tensor, bias: Tensor | None, function: str, dropout: Dropout, side) -> Tensor:
        ctx.save_for_backward(x_RN)
        ctx.bias, ctx.function, ctx.dropout, ctx.side = bias, function, dropout, side
        return _launch(x_RN, bias, None, function, dropout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RN: Tensor):
        (x_RN,) = ctx.saved_tensors
        dx_RN, dbias = _launch(x_RN, ctx.bias, dy_RN.contiguous(), ctx.function, ctx.dropout), None
        if ctx.bias is not None:
            (dbias,) = gradients_by(ctx.side, [ctx.bias], lambda: [rows_sum(dx_RN)], dx_RN)
        return dx_RN, dbias, None, None, None


def _launch(x_RN: Tensor, bias: Tensor | None, dy_RN: Tensor | None, function: str, dropout: Dropout) -> Tensor:
    """Forward, or backward where `dy_RN` is given."""
    from automodel.kernels.activate_triton import activate_kernel

    (R, N), out_RN = x_RN.shape, torch.empty_like(x_RN)
    shape = forward_launch(N)
    activate_kernel[(-(-R // shape.rows),)](
        x_RN, bias, dy_RN, dropout.seed, out_RN, R, dropout.site, drop_threshold(dropout.p), 1.0 / (1.0 - dropout.p),
        N=N, BLOCK_N=shape.block, ROWS=shape.rows, FUNCTION=function, num_warps=shape.warps,
    )  # fmt: skip
    return out_RN


def activate(
    x_RN: Tensor, bias: Tensor | None, function: str, dropout: Dropout, side: SideStream | None = None
) -> Tensor:
    """(R, N). `side`: where the gradient of the bias is summed up."""
    if dropout.p == 0.0:
        dropout = Dropout()
    if not runs_triton(x_RN) or x_RN.shape[1] > WIDEST:
        return activate_reference(x_RN, bias, function, dropout)
    return _Activate.apply(x_RN.contiguous(), bias, function, dropout, side)
