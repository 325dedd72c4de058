"""Residual, dropout and LayerNorm in one pass.

    h = residual + dropout(x + linear_bias)          each of residual, dropout and linear_bias may be absent
    y = (h − mean(h)) / sqrt(var(h) + eps) · weight + norm_bias

Post-norm encoders (BERT, DistilBERT, RoBERTa, ELECTRA) do this twice a layer and keep y; pre-norm ones (ModernBERT)
keep h too (`return_sum`). Embeddings drop out after the norm instead (`drop_last`). In eager torch it is three kernels
and a stored mask forward, and five kernels backward; all of them move bytes and compute next to nothing. Here it is one
launch forward, and two backward: the gradients of the rows with one row of partial sums per program, then the sums of
those.

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
BACKWARD_STAGES, STAGED_BYTES = 3, 8192
"""Tiles of up to so many bytes are loaded two ahead of the one in use: 35.5 to 26.5 µs for 9,045 rows of 768."""


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
    drop_last: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, h) in plain torch; `keep` is the dropout mask, of x's shape."""

    def drop(t: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros((), dtype=t.dtype, device=t.device)
        return t if keep is None else torch.where(keep, t / (1.0 - dropout_p), zero)

    h = x if linear_bias is None else x + linear_bias
    if not drop_last:
        h = drop(h)
    if residual is not None:
        h = residual + h
    # The weights may be wider than the activations; torch's kernels want one dtype.
    wide = torch.promote_types(h.dtype, weight.dtype)
    bias = None if norm_bias is None else norm_bias.to(wide)
    y = F.layer_norm(h.to(wide), weight.shape, weight.to(wide), bias, eps).to(h.dtype)
    return (drop(y) if drop_last else y), h


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


def backward_stages(shape: Launch, element_size: int) -> int:
    return BACKWARD_STAGES if shape.block * shape.rows * element_size <= STAGED_BYTES else 1


class Norm(NamedTuple):
    """Numbers of one norm and its dropout."""

    eps: float
    dropout_p: float = 0.0
    seed: torch.Tensor | None = None
    """None where nothing is dropped."""
    site: int = 0
    drop_last: bool = False

    @property
    def dropout(self) -> tuple[int, float]:
        return drop_threshold(self.dropout_p), 1.0 / (1.0 - self.dropout_p)

    @property
    def drops_last(self) -> bool:
        return self.drop_last and self.seed is not None


class Normed(NamedTuple):
    """What a forward pass gives."""

    y_TD: torch.Tensor
    h_TD: torch.Tensor | None
    """x itself for a plain LayerNorm, None where nobody needs it."""
    mean_T: torch.Tensor
    rstd_T: torch.Tensor


def launch_forward(
    x, residual, weight, norm_bias, linear_bias, norm: Norm, keep_sum, x_rows_T=None, residual_rows_T=None
):
    """The forward kernel over all rows of x, or over those rows of the tables x and residual that the lists name."""
    from automodel.kernels.add_norm_triton import add_norm_forward_kernel

    T, D = (len(x) if x_rows_T is None else len(x_rows_T)), x.shape[1]
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y_TD = torch.empty((T, D), dtype=dtype, device=x.device)
    dropped_first = norm.seed is not None and not norm.drop_last
    changed = residual is not None or linear_bias is not None or dropped_first or x_rows_T is not None
    sum_TD = torch.empty_like(y_TD) if changed and keep_sum else None
    mean_T, rstd_T = torch.empty((2, T), dtype=torch.float32, device=x.device)
    shape = forward_launch(D)
    add_norm_forward_kernel[(-(-T // shape.rows),)](
        x, x_rows_T, residual, residual_rows_T, linear_bias, weight, norm_bias, norm.seed, y_TD, sum_TD, mean_T, rstd_T,
        T, norm.site, *norm.dropout, norm.eps,
        D=D, BLOCK_D=shape.block, ROWS=shape.rows, DROP_LAST=norm.drops_last, num_warps=shape.warps,
    )  # fmt: skip
    return Normed(y_TD, sum_TD if changed else x, mean_T, rstd_T)


def launch_backward(dy, dsum, normed: Normed, weight, norm: Norm, slots: Slots, x_dtype, residual_dtype):
    """(dx, dresidual or None, partial sums of the parameters' gradients)."""
    from automodel.kernels.add_norm_triton import add_norm_backward_kernel

    h = normed.h_TD
    assert h is not None
    (T, D), shape = h.shape, backward_launch(h.shape[1])
    n_tiles = -(-T // shape.rows)
    programs = min(n_tiles, BACKWARD_PROGRAMS_PER_PROCESSOR * processors(h.device))
    # Two tensors even where the numbers are the same: `joined_linear` adds into the residual's gradient in place.
    dx = torch.empty((T, D), dtype=x_dtype, device=h.device)
    dresidual = None if residual_dtype is None else torch.empty((T, D), dtype=residual_dtype, device=h.device)
    partial = torch.empty((programs, slots.count, D), dtype=torch.float32, device=h.device) if slots.count else None
    add_norm_backward_kernel[(programs,)](
        dy, dsum, h, weight, normed.mean_T, normed.rstd_T, norm.seed, dx, dresidual, partial,
        T, n_tiles, norm.site, *norm.dropout,
        D=D, BLOCK_D=shape.block, ROWS=shape.rows, NORM_BIAS_SLOT=slots.norm_bias, LINEAR_BIAS_SLOT=slots.linear_bias,
        SLOTS=slots.count, DROP_LAST=norm.drops_last, STAGES=backward_stages(shape, h.element_size()),
        num_warps=shape.warps,
    )  # fmt: skip
    return dx, dresidual, partial


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, residual, weight, norm_bias, linear_bias, seed, norm: Norm, return_sum, side, shares):
        normed = launch_forward(x, residual, weight, norm_bias, linear_bias, norm._replace(seed=seed), True)
        y, h, mean, rstd = normed
        ctx.save_for_backward(h, mean, rstd, weight, seed)
        ctx.norm, ctx.side = norm._replace(seed=None), side
        ctx.parameters = [p for p in (weight, norm_bias, linear_bias) if p is not None]
        ctx.x_dtype = x.dtype
        same = seed is None or norm.drop_last
        ctx.shares = shares and same and residual is not None and residual.dtype == x.dtype
        ctx.residual_dtype = None if residual is None or ctx.shares else residual.dtype
        ctx.bias_dtypes = tuple(None if b is None else b.dtype for b in (norm_bias, linear_bias))
        ctx.set_materialize_grads(False)
        return (y, h.view_as(h) if h is x else h) if return_sum else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None = None):
        h, mean, rstd, weight, seed = ctx.saved_tensors
        dy = torch.zeros_like(h) if dy is None else dy.contiguous()
        dsum = None if dsum is None else dsum.contiguous()
        slots = slots_of(ctx.needs_input_grad[2:5], ctx.bias_dtypes)
        normed, norm = Normed(dy, h, mean, rstd), ctx.norm._replace(seed=seed)
        dx, dresidual, partial = launch_backward(dy, dsum, normed, weight, norm, slots, ctx.x_dtype, ctx.residual_dtype)
        gradients = give_gradients(ctx, partial, slots, weight.dtype, all(ctx.needs_input_grad[2:5]))
        return dx, (dx if ctx.shares else dresidual), *gradients, None, None, None, None, None


def give_gradients(ctx: Any, partial, slots: Slots, weight_dtype, all_wanted: bool):
    """(dweight, dnorm_bias, dlinear_bias), or three times None after `ctx.side` has taken them."""
    if ctx.side is not None and all_wanted and SideStream.can_take(ctx.parameters):
        ctx.side.give(
            ctx.parameters, lambda: _parameter_gradients(partial, slots, weight_dtype, ctx.bias_dtypes), partial
        )
        return None, None, None
    return _parameter_gradients(partial, slots, weight_dtype, ctx.bias_dtypes)


class Slots(NamedTuple):
    """Where each parameter's partial sums stand; the weight is always slot 0, and 0 means absent for the others."""

    norm_bias: int
    linear_bias: int
    count: int


def slots_of(needs_grad: tuple[bool, ...], bias_dtypes: tuple[torch.dtype | None, ...]) -> Slots:
    """needs_grad: of weight, norm_bias and linear_bias."""
    if not any(needs_grad):
        return Slots(0, 0, 0)
    norm_bias = 1 if bias_dtypes[0] is not None else 0
    linear_bias = 1 + norm_bias if bias_dtypes[1] is not None else 0
    return Slots(norm_bias, linear_bias, 1 + (norm_bias > 0) + (linear_bias > 0))


def _parameter_gradients(partial, slots: Slots, weight_dtype, bias_dtypes):
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
    drop_last: bool = False,
    return_sum: bool = False,
    side: SideStream | None = None,
    shares: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y, or (y, h) with `return_sum`.

    x, residual: (…, D) in bf16, fp16 or fp32; y and h have their promoted dtype. weight, norm_bias, linear_bias: (D,).
    seed: one int64 on x's device, needed when dropout_p > 0. Forward and backward read it where it lies, so advance it
    between a backward and the next forward and not in between. site: a different number for each place in the model.
    drop_last: dropout of y, and not of x.
    side: where the gradients of weight and both biases (all of them then present and leaves) are summed up.
    shares: the gradients of x and residual may be one tensor where they are the same numbers; the caller makes sure
    that nobody changes either in place.
    Under torch.compile the mask comes from torch's own generator, which Inductor knows how to fuse, and not from seed.
    """
    if dropout_p > 0.0 and seed is None:
        raise ValueError("add_norm with dropout_p > 0 needs `seed`, an int64 tensor on the device of x")
    shape, D = x.shape, x.shape[-1]
    seed = seed if dropout_p > 0.0 else None
    if not runs_triton(x) or D > WIDEST:
        keep = None if seed is None else _reference_mask(x, seed, site, dropout_p)
        y, h = add_norm_reference(
            x, residual, weight, norm_bias, eps=eps, linear_bias=linear_bias, dropout_p=dropout_p, keep=keep,
            drop_last=drop_last,
        )  # fmt: skip
        return (y, h) if return_sum else y
    x_TD = x.reshape(-1, D).contiguous()
    residual_TD = None if residual is None else residual.reshape(-1, D).contiguous()
    learned = (x, residual, weight, norm_bias, linear_bias)
    norm = Norm(eps, dropout_p, None, site, drop_last)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in learned):
        out = _AddNorm.apply(x_TD, residual_TD, weight, norm_bias, linear_bias, seed, norm, return_sum, side, shares)
        return (out[0].view(shape), out[1].view(shape)) if return_sum else out.view(shape)
    found = launch_forward(
        x_TD, residual_TD, weight, norm_bias, linear_bias, norm._replace(seed=seed), keep_sum=return_sum
    )
    return (found.y_TD.view(shape), found.h_TD.view(shape)) if return_sum else found.y_TD.view(shape)
