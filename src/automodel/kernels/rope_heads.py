"""From one joined product to queries, keys and values: normalised, rotated, taken apart or left side by side.

    [q k v] = x        q, k ← rope(norm(q)), rope(norm(k)), head by head        v as it is

Without norms (Llama, Mistral, Qwen2, Phi) the rotation is done in place and q, k, v are views of x. With them (Qwen3,
Gemma 3) norm and rotation are one kernel into a tensor of their own, because the backward pass needs what came before
the norm; the row statistics are computed again there, from numbers it reads anyway.

There are two forms, for two kinds of attention. `rope_heads` takes the product apart, for attention that wants three
tensors and hands back three gradients. Left to autograd these would be copied side by side, then rotated, then sent
through two norms; here one kernel reads the three, turns them by −θ, goes back through the norms and writes the
gradient of x. `rope_joined` leaves them side by side, for attention over the joined tensor (`attention.py`); its
backward kernel works in place on the joined gradient. Weight gradients go through partial sums in a fixed order.

Shapes: T tokens, H query heads, K key/value heads, D head dimension, W = (H + 2K)·D; P programs of the backward pass.
H or K may be zero: the last block of a classifier has its queries apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.column_sum import column_sum
from automodel.kernels.dispatch import power_of_two_above, processors, runs_triton
from automodel.kernels.rms_norm import rms_norm_reference
from automodel.kernels.rope import rope_, rope_reference, turn_in_place, warps_for
from automodel.kernels.side_stream import SideStream, gradients_by

BACKWARD_PROGRAMS_PER_PROCESSOR = 4


class Heads(NamedTuple):
    """How the columns of the joined product are divided."""

    queries: int
    keys: int
    """As many values follow."""
    dim: int

    @property
    def turning(self) -> int:
        return self.queries + self.keys

    def split(self, x_TW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views (T, heads, D) of queries, keys and values."""
        q, k, v = x_TW.unflatten(1, (-1, self.dim)).split([self.queries, self.keys, self.keys], dim=1)
        return q, k, v


class HeadNorms(NamedTuple):
    """RMSNorm of each query head and of each key head, as in `rms_norm`."""

    query_weight: Tensor
    key_weight: Tensor
    eps: float
    offset: float = 0.0
    round_first: bool = True


def rope_heads_reference(
    x_TW: Tensor, positions_T: Tensor, table: Tensor, heads: Heads, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = heads.split(x_TW)
    if norms is not None:
        style = {"eps": norms.eps, "offset": norms.offset, "round_first": norms.round_first}
        q, _ = rms_norm_reference(q, None, norms.query_weight, **style)
        k, _ = rms_norm_reference(k, None, norms.key_weight, **style)
    turned = rope_reference(torch.cat([q, k], dim=1).flatten(1), positions_T, table, heads.turning, 1.0, heads.dim)
    q, k = turned.unflatten(1, (-1, heads.dim)).split([heads.queries, heads.keys], dim=1)
    return q, k, v


def _constants(heads: Heads, table: Tensor) -> dict[str, int]:
    slots, block = power_of_two_above(heads.turning), power_of_two_above(table.shape[2])
    return {
        "QUERIES": heads.queries, "KEYS": heads.keys, "HEAD": heads.dim, "HALF": table.shape[2], "BLOCK": block,
        "SLOTS": slots, "VALUE_SLOTS": power_of_two_above(max(1, heads.keys)), "WHOLE": power_of_two_above(heads.dim),
        "num_warps": warps_for(slots * block),
    }  # fmt: skip


def _normed_and_turned(
    x_TW: Tensor, positions_T: Tensor, table: Tensor, heads: Heads, norms: HeadNorms, with_values: bool
) -> Tensor:
    """Queries and keys, and behind them the values as they are where these are wanted too."""
    from automodel.kernels.rope_heads_triton import heads_forward_kernel

    T = x_TW.shape[0]
    width = (heads.turning + (heads.keys if with_values else 0)) * heads.dim
    out = torch.empty((T, width), dtype=x_TW.dtype, device=x_TW.device)
    heads_forward_kernel[(T,)](
        x_TW, positions_T, table, norms.query_weight, norms.key_weight, out,
        table.shape[1], x_TW.stride(0), norms.eps, OFFSET=norms.offset, WITH_VALUES=with_values,
        **_constants(heads, table),
    )  # fmt: skip
    return out


def _backward(
    gradients: Sequence[Tensor | None],
    x_TW: Tensor | None,
    positions_T: Tensor,
    table: Tensor,
    norms: HeadNorms | None,
    heads: Heads,
    dx_TW: Tensor,
) -> Tensor | None:
    """Writes the gradient of x from those of queries, keys and values (None: it stands there already), and returns
    partial sums (P, 2, D) of the gradients of the norms' weights."""
    from automodel.kernels.rope_heads_triton import heads_backward_kernel

    T, partial = positions_T.shape[0], None
    programs = T
    if norms is not None:
        programs = min(T, BACKWARD_PROGRAMS_PER_PROCESSOR * processors(dx_TW.device))
        partial = torch.empty((programs, 2, heads.dim), dtype=torch.float32, device=dx_TW.device)
    strides = (0 if t is None else t.stride(0) for t in (*gradients, x_TW))
    heads_backward_kernel[(programs,)](
        *gradients, x_TW, positions_T, table, None if norms is None else norms.query_weight,
        None if norms is None else norms.key_weight, dx_TW, partial, T, table.shape[1], *strides,
        0.0 if norms is None else norms.eps, OFFSET=0.0 if norms is None else norms.offset, **_constants(heads, table),
    )  # fmt: skip
    return partial


class _RopeHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TW: Tensor,
        positions_T: Tensor,
        table: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        heads: Heads,
        style: tuple[float, float] | None,
        side: SideStream | None,
    ):
        ctx.heads, ctx.style, ctx.side, ctx.weights = heads, style, side, (query_weight, key_weight)
        ctx.width, ctx.dtype, ctx.device = x_TW.shape[1], x_TW.dtype, x_TW.device
        ctx.set_materialize_grads(False)
        # Autograd is not to see that the results are parts of x: it would guard them against changes, at a price.
        x_TW = x_TW.detach()
        if style is None:
            ctx.save_for_backward(positions_T, table)
            return heads.split(turn_in_place(x_TW, positions_T, table, heads.turning, 1.0, heads.dim))
        assert query_weight is not None
        assert key_weight is not None
        ctx.save_for_backward(positions_T, table, x_TW, query_weight, key_weight)
        norms = HeadNorms(query_weight, key_weight, *style)
        turned = _normed_and_turned(x_TW, positions_T, table, heads, norms, with_values=False)
        q, k = turned.unflatten(1, (-1, heads.dim)).split([heads.queries, heads.keys], dim=1)
        return q, k, heads.split(x_TW)[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None):
        positions_T, table, *normed = ctx.saved_tensors
        T, heads = positions_T.shape[0], ctx.heads
        counts = (heads.queries, heads.keys, heads.keys)
        gradients = [_gradient(d, (T, n, heads.dim), ctx) for d, n in zip((dq, dk, dv), counts)]
        dx_TW = torch.empty((T, ctx.width), dtype=ctx.dtype, device=ctx.device)
        norms = HeadNorms(*normed[1:], *ctx.style) if normed else None
        partial = _backward(gradients, normed[0] if normed else None, positions_T, table, norms, heads, dx_TW)
        return dx_TW, None, None, *_weight_gradients(ctx, partial), None, None, None


class _NormedRopeJoined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TW: Tensor,
        positions_T: Tensor,
        table: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        heads: Heads,
        style: tuple[float, float],
        side: SideStream | None,
    ) -> Tensor:
        ctx.save_for_backward(positions_T, table, x_TW, query_weight, key_weight)
        ctx.heads, ctx.style, ctx.side, ctx.weights = heads, style, side, (query_weight, key_weight)
        norms = HeadNorms(query_weight, key_weight, *style)
        return _normed_and_turned(x_TW, positions_T, table, heads, norms, with_values=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TW: Tensor):
        positions_T, table, x_TW, query_weight, key_weight = ctx.saved_tensors
        dy_TW, heads = dy_TW.contiguous(), ctx.heads
        norms = HeadNorms(query_weight, key_weight, *ctx.style)
        gradients = dy_TW, dy_TW[:, heads.queries * heads.dim :], None
        partial = _backward(gradients, x_TW, positions_T, table, norms, heads, dy_TW)
        return dy_TW, None, None, *_weight_gradients(ctx, partial), None, None, None


def _gradient(d: Tensor | None, shape: tuple[int, int, int], ctx: Any) -> Tensor | None:
    """A gradient whose heads lie side by side in every row; None where there are no such heads."""
    if shape[1] == 0:
        return None
    if d is None:
        return torch.zeros(shape, dtype=ctx.dtype, device=ctx.device)
    return d if d.stride(2) == 1 and d.stride(1) == shape[2] else d.contiguous()


def _weight_gradients(ctx: Any, partial: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    counts, learned = (ctx.heads.queries, ctx.heads.keys), ctx.needs_input_grad[3:5]  # frozen ones have none
    wanted = [i for i in range(2) if counts[i] and learned[i] and partial is not None]
    weights = [ctx.weights[i] for i in wanted]

    def gradients() -> list[Tensor]:
        assert partial is not None
        sums = column_sum(partial.flatten(1), weights[0].dtype).unflatten(0, (2, -1))
        return [sums[i] for i in wanted]

    found = dict(zip(wanted, gradients_by(ctx.side, weights, gradients, partial))) if weights else {}
    return found.get(0), found.get(1)


def _check(table: Tensor, heads: Heads, norms: HeadNorms | None) -> None:
    if norms is not None and 2 * table.shape[2] != heads.dim:
        raise ValueError(f"head norms need a table that turns whole heads of {heads.dim}, got {2 * table.shape[2]}")


def rope_heads(
    x_TW: Tensor,
    positions_T: Tensor,
    table: Tensor,
    heads: Heads,
    norms: HeadNorms | None = None,
    side: SideStream | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q (T, H, D), k (T, K, D), v (T, K, D)) of a joined product, in its memory where there are no norms: nobody else
    may read x afterwards. table: `rope_table`; with norms it must turn whole heads. side: where the gradients of the
    norms' weights, leaves, are summed up."""
    _check(table, heads, norms)
    if not runs_triton(x_TW):
        return rope_heads_reference(x_TW, positions_T, table, heads, norms)
    query_weight, key_weight = (None, None) if norms is None else norms[:2]
    style = None if norms is None else (norms.eps, norms.offset)
    return _RopeHeads.apply(x_TW, positions_T, table, query_weight, key_weight, heads, style, side)


def rope_joined(
    x_TW: Tensor,
    positions_T: Tensor,
    table: Tensor,
    heads: Heads,
    norms: HeadNorms | None = None,
    side: SideStream | None = None,
) -> Tensor:
    """The same, side by side as they are: (T, W)."""
    _check(table, heads, norms)
    if not runs_triton(x_TW):
        return torch.cat(rope_heads_reference(x_TW, positions_T, table, heads, norms), dim=1).flatten(1)
    if norms is None:
        return rope_(x_TW, positions_T, table, heads.turning, heads.dim)
    style = (norms.eps, norms.offset)
    return _NormedRopeJoined.apply(x_TW, positions_T, table, norms.query_weight, norms.key_weight, heads, style, side)
