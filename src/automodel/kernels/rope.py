"""Rotary positions, in place.

    x = (x₁, x₂) halves of a head         y₁ = x₁ cos θ − x₂ sin θ          y₂ = x₂ cos θ + x₁ sin θ          θ = p · f

Stock code rotates through half a dozen temporaries in fp32; this is one pass over the heads that turn. Queries, keys
and values lie side by side as they leave their common GEMM, and nobody else holds that tensor, so it is rotated where
it is. The gradient is the rotation by −θ, again in place on the gradient. Angles come from an fp32 table.

Shapes: T tokens, W = S·D: slots (heads side by side) of head dimension D, P positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.dispatch import power_of_two_above, runs_triton


def rope_table(inverse_frequencies: Tensor, positions: int, scaling: float = 1.0) -> Tensor:
    """(2, P, D/2) fp32: cosines and sines of every position."""
    angles = torch.arange(positions, device=inverse_frequencies.device).float()[:, None] * inverse_frequencies.float()
    return torch.stack([angles.cos() * scaling, angles.sin() * scaling]).contiguous()


def rope_reference(x_TW: Tensor, positions_T: Tensor, table: Tensor, turning: int, sign: float = 1.0) -> Tensor:
    """A rotated copy; slots from `turning` on stay as they are."""
    cos, sin = table[0, positions_T][:, None], sign * table[1, positions_T][:, None]
    x_TSD = x_TW.unflatten(1, (-1, 2 * table.shape[2]))
    first, second = x_TSD[:, :turning].float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x_TW.dtype), x_TSD[:, turning:]], dim=1).flatten(1)


def _turn(x_TW: Tensor, positions_T: Tensor, table: Tensor, turning: int, sign: float) -> Tensor:
    if not runs_triton(x_TW):
        return x_TW.copy_(rope_reference(x_TW, positions_T, table, turning, sign))
    from automodel.kernels.rope_triton import rope_kernel

    rope_kernel[(x_TW.shape[0],)](
        x_TW, positions_T, table, table.shape[1], x_TW.stride(0), sign,
        TURNING=turning, SLOTS=power_of_two_above(turning), HALF=table.shape[2], num_warps=2,
    )  # fmt: skip
    return x_TW


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TW: Tensor, positions_T: Tensor, table: Tensor, turning: int) -> Tensor:
        ctx.save_for_backward(positions_T, table)
        ctx.turning = turning
        ctx.mark_dirty(x_TW)
        return _turn(x_TW, positions_T, table, turning, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TW: Tensor):
        positions_T, table = ctx.saved_tensors
        return _turn(dy_TW.contiguous(), positions_T, table, ctx.turning, -1.0), None, None, None


def rope_(x_TW: Tensor, positions_T: Tensor, table: Tensor, turning: int) -> Tensor:
    """Rotates the first `turning` slots of x in place, and its gradient on the way back. Rows are contiguous, and x is
    no view: autograd would copy around an in-place change of one."""
    return _Rope.apply(x_TW, positions_T, table, turning)
