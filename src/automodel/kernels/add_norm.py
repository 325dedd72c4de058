"""Residual, dropout and LayerNorm in one pass.

    h = residual + dropout(x + linear_bias)          each of residual, dropout and linear_bias may be absent
    y = (h − mean(h)) / sqrt(var(h) + eps) · weight + norm_bias

Post-norm encoders (BERT, DistilBERT, RoBERTa, ELECTRA) do this twice a layer and keep y; pre-norm ones (ModernBERT)
keep h too (`return_sum`). In eager torch it is three kernels and a stored mask forward, and five kernels backward; all
of them move bytes and compute next to nothing. Here it is one launch forward, and two backward: the gradients of the
rows with one row of partial sums per program, then the sums of those.

    dh          = rstd · (w·dy − mean(w·dy) − normed · mean(w·dy · normed)) + dh from the second output
    dresidual   = dh                          dx = kept ? dh / (1 − p) : 0
    dweight     = Σ_rows dy · normed          dnorm_bias = Σ_rows dy          dlinear_bias = Σ_rows dx

The floor is memory: bf16 forward moves 4 tensors, backward 4 (5 with a second output). At T=2048, D=768 that is 12.6 MB
each, 3 µs at 4.25 TB/s, about what a launch costs. Stored for the backward: h in its own dtype and two numbers a row;
the mask is computed again (`philox.py`). Arithmetic is fp32 throughout, with one rounding of h and one of each output.

Shapes: T rows (all leading dimensions together), D width, P programs of the backward pass.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from automodel.kernels.column_sum import column_sum
from automodel.kernels.dispatch import power_of_two_above, processors, runs_triton
from automodel.kernels.philox import ROWS_PER_DRAW, drop_threshold, keep_mask
from automodel.kernels.side_stream import SideStream

WIDEST = 8192
BACKWARD_PROGRAMS_PER_PROCESSOR = 2


def add_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    norm_bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-12,
    linear_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, h) in plain torch; `keep` is the dropout mask, of x's shape."""
    h = x if linear_bias is None else x + linear_bias
    if keep is not None:
        h = torch.where(keep, h / (1.0 - dropout_p), torch.zeros((), dtype=h.dtype, device=h.device))
    if residual is not None:
        h = residual + h
    # The weights may be wider than the activations; torch's kernels want one dtype.
    wide = torch.promote_types(h.dtype, weight.dtype)
    bias = None if norm_bias is None else norm_bias.to(wide)
    return F.layer_norm(h.to(wide), weight.shape, weight.to(wide), bias, eps).to(h.dtype), h


class Launch(NamedTuple):
    """Shape of a tile, a power of two as wide as the row, and the warps that share it."""

    block: int
    rows: int
    warps: int


@functools.cache
def forward_launch(width: int) -> Launch:
    """All rows of a draw at 32 elements a thread, or single rows where that would not fit into registers."""
    block = power_of_two_above(width)
    if block <= 2048:
        return Launch(block, ROWS_PER_DRAW, max(1, block // 256))
    return Launch(block, 1, min(16, block // 512))


@functools.cache
def backward_launch(width: int) -> Launch:
    """As forward: about 210 registers, which two programs of four warps on a processor can have."""
    return forward_launch(width)


def _forward(x_TD, residual_TD, weight, norm_bias, linear_bias, seed, site, dropout_p, eps, keep_sum):
    """Launch the forward kernel; h is x itself for a plain LayerNorm, and None when nobody needs it."""
    from automodel.kernels.add_norm_triton import add_norm_forward_kernel

    T, D = x_TD.shape
    dtype = x_TD.dtype if residual_TD is None else torch.promote_types(x_TD.dtype, residual_TD.dtype)
    y_TD = torch.empty((T, D), dtype=dtype, device=x_TD.device)
    changed = residual_TD is not None or linear_bias is not None or seed is not None
    sum_TD = torch.empty_like(y_TD) if changed and keep_sum else None
    mean_T, rstd_T = torch.empty((2, T), dtype=torch.float32, device=x_TD.device)
    shape = forward_launch(D)
    add_norm_forward_kernel[(-(-T // shape.rows),)](
        x_TD, residual_TD, linear_bias, weight, norm_bias, seed, y_TD, sum_TD, mean_T, rstd_T,
        T, site, drop_threshold(dropout_p), 1.0 / (1.0 - dropout_p), eps,
        D=D, BLOCK_D=shape.block, ROWS=shape.rows, num_warps=shape.warps,
    )  # fmt: skip
    return y_TD, (sum_TD if changed else x_TD), mean_T, rstd_T


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, residual, weight, norm_bias, linear_bias, seed, site, dropout_p, eps, return_sum, side):
        y, h, mean, rstd = _forward(x, residual, weight, norm_bias, linear_bias, seed, site, dropout_p, eps, True)
        ctx.save_for_backward(h, mean, rstd, weight, seed)
        ctx.site, ctx.dropout_p, ctx.side = site, dropout_p, side
        ctx.parameters = [p for p in (weight, norm_bias, linear_bias) if p is not None]
        ctx.x_dtype = x.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.bias_dtypes = tuple(None if b is None else b.dtype for b in (norm_bias, linear_bias))
        ctx.set_materialize_grads(False)
        return (y, h.view_as(h) if h is x else h) if return_sum else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None = None):
        h, mean, rstd, weight, seed = ctx.saved_tensors
        from automodel.kernels.add_norm_triton import add_norm_backward_kernel

        dy = torch.zeros_like(h) if dy is None else dy.contiguous()
        dsum = None if dsum is None else dsum.contiguous()
        (T, D), shape = h.shape, backward_launch(h.shape[1])
        n_tiles = -(-T // shape.rows)
        programs = min(n_tiles, BACKWARD_PROGRAMS_PER_PROCESSOR * processors(h.device))
        # Two tensors even where the numbers are the same: `joined_linear` adds into the residual's gradient in place.
        one = ctx.residual_dtype is None
        dx = torch.empty((T, D), dtype=ctx.x_dtype, device=h.device)
        dresidual = None if one else torch.empty((T, D), dtype=ctx.residual_dtype, device=h.device)
        slots = _slots(ctx.needs_input_grad, ctx.bias_dtypes)
        partial = torch.empty((programs, slots.count, D), dtype=torch.float32, device=h.device) if slots.count else None
        add_norm_backward_kernel[(programs,)](
            dy, dsum, h, weight, mean, rstd, seed, dx, dresidual, partial,
            T, n_tiles, ctx.site, drop_threshold(ctx.dropout_p), 1.0 / (1.0 - ctx.dropout_p),
            D=D, BLOCK_D=shape.block, ROWS=shape.rows, NORM_BIAS_SLOT=slots.norm_bias,
            LINEAR_BIAS_SLOT=slots.linear_bias, SLOTS=slots.count, num_warps=shape.warps,
        )  # fmt: skip
        gradients = (None, None, None)
        if ctx.side is not None and all(ctx.needs_input_grad[2:5]) and SideStream.can_take(ctx.parameters):
            assert partial is not None
            ctx.side.give(
                ctx.parameters, lambda: _parameter_gradients(partial, slots, weight.dtype, ctx.bias_dtypes), partial
            )
        else:
            gradients = _parameter_gradients(partial, slots, weight.dtype, ctx.bias_dtypes)
        return dx, dresidual, *gradients, None, None, None, None, None, None


class _Slots(NamedTuple):
    """Where each parameter's partial sums stand; the weight is always slot 0, and 0 means absent for the others."""

    norm_bias: int
    linear_bias: int
    count: int


def _slots(needs_grad: tuple[bool, ...], bias_dtypes: tuple[torch.dtype | None, ...]) -> _Slots:
    if not any(needs_grad[2:5]):
        return _Slots(0, 0, 0)
    norm_bias = 1 if bias_dtypes[0] is not None else 0
    linear_bias = 1 + norm_bias if bias_dtypes[1] is not None else 0
    return _Slots(norm_bias, linear_bias, 1 + (norm_bias > 0) + (linear_bias > 0))


def _parameter_gradients(partial, slots: _Slots, weight_dtype, bias_dtypes):
    """(dweight, dnorm_bias, dlinear_bias) from the partial sums, in one launch for all three."""
    if partial is None:
        return None, None, None
    programs, count, width = partial.shape
    sums = column_sum(partial.view(programs, count * width), weight_dtype).view(count, width)
    dnorm_bias = sums[slots.norm_bias].to(bias_dtypes[0]) if slots.norm_bias else None
    dlinear_bias = sums[slots.linear_bias].to(bias_dtypes[1]) if slots.linear_bias else None
    return sums[0], dnorm_bias, dlinear_bias


def _reference_mask(x: torch.Tensor, seed: torch.Tensor, site: int, p: float) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return torch.rand(x.shape, device=x.device) >= p
    return keep_mask(seed, site, x.numel() // x.shape[-1], x.shape[-1], p).view(x.shape)


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    norm_bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-12,
    linear_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    site: int = 0,
    return_sum: bool = False,
    side: SideStream | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y, or (y, h) with `return_sum`.

    x, residual: (…, D) in bf16, fp16 or fp32; y and h have their promoted dtype. weight, norm_bias, linear_bias: (D,).
    seed: one int64 on x's device, needed when dropout_p > 0. Forward and backward read it where it lies, so advance it
    between a backward and the next forward and not in between. site: a different number for each place in the model.
    side: where the gradients of weight and both biases (all of them then present and leaves) are summed up.
    Under torch.compile the mask comes from torch's own generator, which Inductor knows how to fuse, and not from seed.
    """
    if dropout_p > 0.0 and seed is None:
        raise ValueError("add_norm with dropout_p > 0 needs `seed`, an int64 tensor on the device of x")
    shape, D = x.shape, x.shape[-1]
    seed = seed if dropout_p > 0.0 else None
    if not runs_triton(x) or D > WIDEST:
        keep = None if seed is None else _reference_mask(x, seed, site, dropout_p)
        y, h = add_norm_reference(
            x, residual, weight, norm_bias, eps=eps, linear_bias=linear_bias, dropout_p=dropout_p, keep=keep
        )
        return (y, h) if return_sum else y
    x_TD = x.reshape(-1, D).contiguous()
    residual_TD = None if residual is None else residual.reshape(-1, D).contiguous()
    learned = (x, residual, weight, norm_bias, linear_bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in learned):
        out = _AddNorm.apply(
            x_TD, residual_TD, weight, norm_bias, linear_bias, seed, site, dropout_p, eps, return_sum, side
        )
        return (out[0].view(shape), out[1].view(shape)) if return_sum else out.view(shape)
    y, h, _, _ = _forward(x_TD, residual_TD, weight, norm_bias, linear_bias, seed, site, dropout_p, eps, return_sum)
    return (y.view(shape), h.view(shape)) if return_sum else y.view(shape)
