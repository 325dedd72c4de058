"""Rotary positions, in place.

    x = (x₁, x₂) halves of a head         y₁ = x₁ cos θ − x₂ sin θ          y₂ = x₂ cos θ + x₁ sin θ          θ = p · f

Stock code rotates through half a dozen temporaries in fp32; this is one pass over the heads that turn. Queries, keys
and values lie side by side as they leave their common GEMM, and nobody else holds that tensor, so it is rotated where
it is. The gradient is the rotation by −θ, again in place on the gradient. Angles come from an fp32 table.

Some models turn only the first part of a head (Phi-4-mini three quarters): the table is then narrower than the head,
and the rest of the head stays as it is.

Shapes: T tokens, W = S·D: slots (heads side by side) of head dimension D, P positions, E ≤ D/2 angles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.dispatch import power_of_two_above, runs_triton


def rope_table(inverse_frequencies: Tensor, positions: int, scaling: float = 1.0) -> Tensor:
    """(2, P, E) fp32: cosines and sines of every position."""
    angles = torch.arange(positions, device=inverse_frequencies.device).float()[:, None] * inverse_frequencies.float()
    return torch.stack([angles.cos() * scaling, angles.sin() * scaling]).contiguous()


def rope_reference(
    x_TW: Tensor, positions_T: Tensor, table: Tensor, turning: int, sign: float = 1.0, head_dim: int | None = None
) -> Tensor:
    """A rotated copy; slots from `turning` on stay as they are."""
    angles = table.shape[2]
    cos, sin = table[0, positions_T][:, None], sign * table[1, positions_T][:, None]
    x_TSD = x_TW.unflatten(1, (-1, head_dim or 2 * angles))
    turn_TSD = x_TSD[:, :turning]
    first, second = turn_TSD[..., : 2 * angles].float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_TW.dtype)
    turned = torch.cat([turned, turn_TSD[..., 2 * angles :]], dim=-1)
    return torch.cat([turned, x_TSD[:, turning:]], dim=1).flatten(1)


def turn_in_place(
    x_TW: Tensor, positions_T: Tensor, table: Tensor, turning: int, sign: float, head_dim: int | None = None
) -> Tensor:
    """The rotation without its gradient."""
    if not runs_triton(x_TW):
        return x_TW.copy_(rope_reference(x_TW, positions_T, table, turning, sign, head_dim))
    from automodel.kernels.rope_triton import rope_kernel

    angles = table.shape[2]
    slots, block = power_of_two_above(turning), power_of_two_above(angles)
    rope_kernel[(x_TW.shape[0],)](
        x_TW, positions_T, table, table.shape[1], x_TW.stride(0), sign,
        TURNING=turning, SLOTS=slots, HEAD=head_dim or 2 * angles, HALF=angles, BLOCK=block,
        num_warps=warps_for(slots * block),
    )  # fmt: skip
    return x_TW


def warps_for(pairs: int) -> int:
    """16 pairs of elements a thread: a token of ModernBERT has 1,024 of them, one of an 8B model 4,096."""
    return max(1, min(8, pairs // 512))


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TW: Tensor, positions_T: Tensor, table: Tensor, turning: int, head_dim: int | None
    ) -> Tensor:
        ctx.save_for_backward(positions_T, table)
        ctx.turning, ctx.head_dim = turning, head_dim
        ctx.mark_dirty(x_TW)
        return turn_in_place(x_TW, positions_T, table, turning, 1.0, head_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TW: Tensor):
        positions_T, table = ctx.saved_tensors
        dx_TW = turn_in_place(dy_TW.contiguous(), positions_T, table, ctx.turning, -1.0, ctx.head_dim)
        return dx_TW, None, None, None, None


def rope_(x_TW: Tensor, positions_T: Tensor, table: Tensor, turning: int, head_dim: int | None = None) -> Tensor:
    """Rotates the first `turning` slots of x in place, and its gradient on the way back. Rows are contiguous, and x is
    no view: autograd would copy around an in-place change of one. head_dim: where it is more than the table turns."""
    return _Rope.apply(x_TW, positions_T, table, turning, head_dim)
