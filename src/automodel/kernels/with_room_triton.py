"""The Triton half of `with_room`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_rows"])
def with_room_kernel(
    X, WIDE, n_rows, x_stride,
    D: tl.constexpr, ZEROS_FROM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns D to ZEROS_FROM are somebody else's and are left alone."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    exists = rows < n_rows
    x = tl.load(X + rows * x_stride + cols, mask=exists & (cols < D), other=0.0)
    written = (cols < D) | ((cols >= ZEROS_FROM) & (cols < WIDTH))
    tl.store(WIDE + rows * WIDTH + cols, x, mask=exists & written)
