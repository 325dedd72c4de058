"""Rows with room behind them: x as the left part of a wider matrix.

    wide = [x  ·  0]           · : left for somebody else to write, who multiplies with all of it

torch copies into a part of a matrix element by element, at a third of the memory's speed (103 µs for 8,192 rows of
4,096 in bf16 on an H200, where 32 are possible).

Shapes: T rows, D width of x, K of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from automodel.kernels.dispatch import runs_triton

ROWS, BLOCK, WARPS = 4, 1024, 4


def with_room(x_TD: Tensor, zeros_from: int, width: int) -> Tensor:
    """(T, K): x, then columns that hold anything, then zeros from column `zeros_from` on."""
    T, D = x_TD.shape
    wide_TK = torch.empty((T, width), dtype=x_TD.dtype, device=x_TD.device)
    if not runs_triton(x_TD) or x_TD.stride(1) != 1:
        wide_TK[:, :D].copy_(x_TD)
        wide_TK[:, zeros_from:].zero_()
        return wide_TK
    from automodel.kernels.with_room_triton import with_room_kernel

    with_room_kernel[(-(-T // ROWS), -(-width // BLOCK))](
        x_TD, wide_TK, T, x_TD.stride(0),
        D=D, ZEROS_FROM=zeros_from, WIDTH=width, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return wide_TK
