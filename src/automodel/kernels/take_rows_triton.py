"""The Triton half of `take_rows`."""

import triton
import triton.language as tl


@triton.jit
def put_rows_kernel(DY, ROWS, DX, N: tl.constexpr, BLOCK: tl.constexpr):
    """Program r: row r of DY to its place, unless it stands behind the ascending ones."""
    r = tl.program_id(0).to(tl.int64)
    row = tl.load(ROWS + r)
    before = tl.load(ROWS + r - 1, mask=r > 0, other=-1)
    if row > before:
        for first in range(0, N, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            values = tl.load(DY + r * N + cols, mask=cols < N, other=0.0)
            tl.store(DX + row * N + cols, values, mask=cols < N)
