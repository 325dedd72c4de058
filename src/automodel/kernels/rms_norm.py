"""Residual and RMSNorm in one pass.

    h = x + residual                                       the residual may be absent
    y = h · rsqrt(mean(h²) + eps) · (offset + weight)      offset 0 (Llama) or 1 (Gemma)

Decoders do this twice a layer and need both results: y goes into the next product, h is the stream that goes on. Stock
code takes six kernels forward and about ten backward, all of which move bytes. Here it is one launch forward and two
backward: the gradients of the rows with one row of partial sums per program, then the sums of those.

    g       = dy · (offset + weight)
    dh      = rstd · (g − normed · mean(g · normed)) + dh from the second output
    dweight = Σ_rows dy · normed

x and the residual receive the *same* gradient tensor, which saves writing it twice: whoever receives it may not change
it in place. Stored for the backward pass: h in its own dtype and one number a row.

Arithmetic is fp32. The order of roundings is that of the family's own module: Llama rounds the normalised row to the
model's dtype before it multiplies with the weight (`round_first`), Gemma and OLMo2 multiply in fp32 and round once.

Shapes: T rows (all leading dimensions together), D width, P programs of the backward pass.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.column_sum import column_sum
from automodel.kernels.dispatch import power_of_two_above, processors, runs_triton
from automodel.kernels.side_stream import SideStream, gradients_by

WIDEST = 16384
BACKWARD_STAGES, STAGED_BYTES = 3, 16384  # rows of up to so many bytes are loaded two ahead, as `add_norm` does it


def rms_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    round_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """(y, h) in plain torch."""
    h = x if residual is None else residual + x
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        return ((offset + weight if offset else weight) * normed.to(h.dtype)).to(h.dtype), h
    return (normed * (offset + weight.to(wide.dtype))).to(h.dtype), h


class Launch(NamedTuple):
    """A power of two as wide as the row, the warps that share it, and the programs of a processor that walk over rows
    in the backward pass."""

    block: int
    warps: int
    walkers: int


@functools.cache
def launch_shape(width: int) -> Launch:
    """16 elements a thread. Rows one by one leave nobody waiting for the last tile: in an earlier form
    of these kernels, 1,376 rows of 2,048 took 8.4 + 10.5 µs in tiles of four and 7.8 + 8.7 in tiles of one."""
    block = power_of_two_above(width)
    return Launch(block, min(16, max(1, block // 512)), min(4, max(2, 4096 // block)))


def _forward(x_TD: Tensor, residual_TD: Tensor | None, weight: Tensor, eps: float, offset: float, round_first: bool):
    """(y, h, rstd); h is x itself where there is no residual."""
    from automodel.kernels.rms_norm_triton import rms_norm_forward_kernel

    T, D = x_TD.shape
    y_TD = torch.empty((T, D), dtype=x_TD.dtype, device=x_TD.device)
    sum_TD = None if residual_TD is None else torch.empty_like(y_TD)
    rstd_T = torch.empty(T, dtype=torch.float32, device=x_TD.device)
    shape = launch_shape(D)
    rms_norm_forward_kernel[(T,)](
        x_TD, residual_TD, weight, y_TD, sum_TD, rstd_T, x_TD.stride(0), eps,
        D=D, BLOCK_D=shape.block, OFFSET=offset, ROUND_FIRST=round_first, num_warps=shape.warps,
    )  # fmt: skip
    return y_TD, (x_TD if sum_TD is None else sum_TD), rstd_T


def backward_stages(shape: Launch, element_size: int) -> int:
    return BACKWARD_STAGES if shape.block * element_size <= STAGED_BYTES else 1


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        weight: Tensor,
        eps: float,
        offset: float,
        round_first: bool,
        side: SideStream | None,
    ):
        y, h, rstd = _forward(x_TD, residual_TD, weight, eps, offset, round_first)
        ctx.save_for_backward(h, rstd, weight)
        ctx.offset, ctx.side, ctx.weight = offset, side, weight
        ctx.set_materialize_grads(False)
        return y, h.view_as(h) if h is x_TD else h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None):
        from automodel.kernels.rms_norm_triton import rms_norm_backward_kernel

        h, rstd, weight = ctx.saved_tensors
        (T, D), shape = h.shape, launch_shape(h.shape[1])
        dy = torch.zeros((T, D), dtype=h.dtype, device=h.device) if dy is None else dy.contiguous()
        dsum = None if dsum is None else dsum.contiguous()
        programs = min(T, shape.walkers * processors(h.device))
        dh = torch.empty((T, D), dtype=h.dtype, device=h.device)
        partial = None
        if ctx.needs_input_grad[2]:
            partial = torch.empty((programs, D), dtype=torch.float32, device=h.device)
        rms_norm_backward_kernel[(programs,)](
            dy, dsum, h, weight, rstd, dh, partial, T, h.stride(0),
            D=D, BLOCK_D=shape.block, OFFSET=ctx.offset, STAGES=backward_stages(shape, h.element_size()),
            num_warps=shape.warps,
        )  # fmt: skip
        dweight = None
        if partial is not None:
            (dweight,) = gradients_by(ctx.side, [ctx.weight], lambda: [column_sum(partial, weight.dtype)], partial)
        return dh, (dh if ctx.needs_input_grad[1] else None), dweight, None, None, None, None


def _rows(x: Tensor) -> Tensor:
    """The tensor as (T, D) with unit stride along the row, in place where it is that already."""
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    round_first: bool = True,
    side: SideStream | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, h). x and residual: (…, D) of one dtype, which y and h have too; weight: (D,). Rows of x may lie apart (a
    slice of a wider product). side: where the gradient of the weight, a leaf, is summed up."""
    if residual is not None and residual.dtype != x.dtype:
        raise ValueError(f"rms_norm adds tensors of one dtype, got {x.dtype} and {residual.dtype}")
    if not runs_triton(x) or x.shape[-1] > WIDEST:
        return rms_norm_reference(x, residual, weight, eps=eps, offset=offset, round_first=round_first)
    x_TD = _rows(x)
    residual_TD = None if residual is None else _rows(residual).contiguous()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual, weight)):
        y, h = _RmsNorm.apply(x_TD, residual_TD, weight, eps, offset, round_first, side)
    else:
        y, h, _ = _forward(x_TD, residual_TD, weight, eps, offset, round_first)
    # No views of what has the right shape already: an in-place operation on a view would cost a copy.
    return (y, h) if x.ndim == 2 else (y.view(x.shape), h.view(x.shape))
