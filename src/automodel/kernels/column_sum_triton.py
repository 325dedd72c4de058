"""The Triton half of `column_sum`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_rows"])
def column_sum_kernel(PARTIAL, OUT, n_rows, n_columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for first in range(0, n_rows, BLOCK_ROWS):
        rows = first + tl.arange(0, BLOCK_ROWS)
        inside = (rows < n_rows)[:, None] & (cols < n_columns)[None, :]
        total += tl.load(PARTIAL + rows[:, None] * n_columns + cols[None, :], mask=inside, other=0.0)
    tl.store(OUT + cols, tl.sum(total, axis=0).to(OUT.dtype.element_ty), mask=cols < n_columns)


@triton.jit(do_not_specialize=["n_rows"])
def rows_sum_kernel(
    X, PARTIAL, n_rows, row_stride, N: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Program (c, p) adds up every P-th block of rows of its columns."""
    cols = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    chunk = tl.program_id(1)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for first in range(chunk * BLOCK_ROWS, n_rows, tl.num_programs(1) * BLOCK_ROWS):
        rows = first + tl.arange(0, BLOCK_ROWS)
        inside = (rows < n_rows)[:, None] & (cols < N)[None, :]
        at = rows.to(tl.int64)[:, None] * row_stride + cols[None, :]
        total += tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(PARTIAL + chunk * N + cols, tl.sum(total, axis=0), mask=cols < N)
