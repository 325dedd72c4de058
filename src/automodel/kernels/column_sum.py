"""The second half of every parameter gradient here: sums over the rows of a small matrix of partial sums.

    out[n] = Σ_p partial[p, n]

A backward kernel leaves one row of fp32 partial sums per program; adding them up in a fixed order in a second launch,
rather than with atomics in the first, makes gradients the same in every run.
"""

from __future__ import annotations

import torch

from automodel.kernels.dispatch import runs_triton

BLOCK_ROWS, BLOCK_COLUMNS = 64, 32
WIDE_COLUMNS, MOST_CHUNKS = 128, 32


def column_sum_reference(partial_PN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return partial_PN.sum(0).to(dtype)


def rows_sum(x_TN: torch.Tensor) -> torch.Tensor:
    """Sums over the rows of a tall matrix in its own dtype, through fp32 partial sums."""
    if not runs_triton(x_TN):
        return x_TN.sum(0, dtype=torch.float32).to(x_TN.dtype)
    from automodel.kernels.column_sum_triton import rows_sum_kernel

    T, N = x_TN.shape
    chunks = min(MOST_CHUNKS, -(-T // BLOCK_ROWS))
    partial_PN = torch.empty((chunks, N), dtype=torch.float32, device=x_TN.device)
    rows_sum_kernel[(-(-N // WIDE_COLUMNS), chunks)](
        x_TN, partial_PN, T, x_TN.stride(0), N=N, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=WIDE_COLUMNS, num_warps=8
    )
    return column_sum(partial_PN, x_TN.dtype)


def column_sum(partial_PN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sums of the columns of a contiguous fp32 matrix, rounded once to `dtype`."""
    if not runs_triton(partial_PN):
        return column_sum_reference(partial_PN, dtype)
    from automodel.kernels.column_sum_triton import column_sum_kernel

    n_rows, n_columns = partial_PN.shape
    out_N = torch.empty(n_columns, dtype=dtype, device=partial_PN.device)
    column_sum_kernel[(-(-n_columns // BLOCK_COLUMNS),)](
        partial_PN, out_N, n_rows, n_columns, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=4
    )
    return out_N
