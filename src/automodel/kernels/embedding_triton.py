"""The Triton half of `embedding`."""

import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]


@triton.jit(do_not_specialize=["n_tokens", "padding"])
def word_backward_kernel(
    DROWS, ORDER, IDS, DWEIGHT, n_tokens, padding, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr
):
    """Program (i, c): if the i-th token in sorted order is the first of its id, it adds up the whole run."""
    i = tl.program_id(0)
    token = tl.load(IDS + tl.load(ORDER + i))
    before = tl.load(IDS + tl.load(ORDER + tl.maximum(i - 1, 0)))
    if ((i == 0) | (before != token)) & (token != padding):
        cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_N,), tl.float32)
        start = i
        full = ROWS
        while full == ROWS:
            rows = start + tl.arange(0, ROWS)
            places = tl.load(ORDER + rows, mask=rows < n_tokens, other=0)
            same = (rows < n_tokens) & (tl.load(IDS + places) == token)
            inside = same[:, None] & (cols < N)[None, :]
            total += tl.sum(
                tl.load(DROWS + places[:, None] * N + cols[None, :], mask=inside, other=0.0).to(tl.float32), 0
            )
            full = tl.sum(same.to(tl.int32), 0)
            start += ROWS
        tl.store(DWEIGHT + token * N + cols, total.to(DWEIGHT.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["n_documents", "offset"])
def position_backward_kernel(
    DROWS, CU_SEQLENS, DWEIGHT, n_documents, offset, N: tl.constexpr, BLOCK_N: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """Program (r, c): row r of the table is position r - offset of every document long enough."""
    row = tl.program_id(0)
    position = row - offset
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, n_documents, DOCUMENTS):
        documents = first + tl.arange(0, DOCUMENTS)
        real = documents < n_documents
        begins = tl.load(CU_SEQLENS + documents, mask=real, other=0)
        ends = tl.load(CU_SEQLENS + documents + 1, mask=real, other=0)
        has = real & (position >= 0) & (begins + position < ends)
        inside = has[:, None] & (cols < N)[None, :]
        places = begins + position
        total += tl.sum(tl.load(DROWS + places[:, None] * N + cols[None, :], mask=inside, other=0.0).to(tl.float32), 0)
    tl.store(DWEIGHT + row * N + cols, total.to(DWEIGHT.dtype.element_ty), mask=cols < N)
