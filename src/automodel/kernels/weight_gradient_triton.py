"""The Triton half of `weight_gradient`. Tensors come as descriptors of their tiles; outside of them is zero."""

import triton
import triton.language as tl

from automodel.kernels.triton_keys import settle_keys

GROUP = tl.constexpr(8)
"""Rows of tiles that are walked through together: their columns of x stay in the cache."""


@triton.jit
def place_of(tile, rows, columns):
    """(row, column) of a tile in the order of the walk."""
    width = GROUP * columns
    first = tile // width * GROUP
    height = tl.minimum(rows - first, GROUP)
    return first + tile % width % height, tile % width // height


@triton.jit
def row_squares(x):
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


@triton.jit(do_not_specialize=["n_steps", "tiles_o", "tiles_i"])
def weight_gradient_kernel(
    DY, X, OUT, PARTIAL, n_steps, tiles_o, tiles_i, TILE_O: tl.constexpr, TILE_I: tl.constexpr, STEP: tl.constexpr
):
    program = tl.program_id(0)
    squares = tl.zeros((TILE_O,), tl.float32)
    for tile in tl.range(program, tiles_o * tiles_i, tl.num_programs(0), flatten=True):
        o, i = place_of(tile, tiles_o, tiles_i)
        total = tl.zeros((TILE_O, TILE_I), tl.float32)
        for step in range(n_steps):
            dy = DY.load([step * STEP, o * TILE_O])
            x = X.load([step * STEP, i * TILE_I])
            total = tl.dot(dy.T, x, total)
        # Both halves lie in the registers of the same threads: taking them apart moves nothing.
        left, right = tl.split(tl.permute(tl.reshape(total, (TILE_O, 2, TILE_I // 2)), (0, 2, 1)))
        left = left.to(OUT.dtype)
        OUT.store([o * TILE_O, i * TILE_I], left)
        right = right.to(OUT.dtype)
        OUT.store([o * TILE_O, i * TILE_I + TILE_I // 2], right)
        squares += row_squares(left) + row_squares(right)
    tl.store(PARTIAL + program, tl.sum(squares, axis=0))


settle_keys(globals())
