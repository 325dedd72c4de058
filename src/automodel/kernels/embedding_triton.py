"""The Triton half of `embedding`."""

import triton
import triton.language as tl

from automodel.kernels.triton_keys import settle_keys


@triton.jit
def add_up_run(DROWS, RUNS, i, length, cols, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the rows of one run, `ROWS` of them in flight at a time."""
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, length, ROWS):
        rows = first + tl.arange(0, ROWS)
        places = tl.load(RUNS + i + rows, mask=rows < length, other=0).to(tl.int64)
        inside = (rows < length)[:, None] & (cols < N)[None, :]
        total += tl.load(DROWS + places[:, None] * N + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def store_row(TO, total, inside, ADD: tl.constexpr):
    if ADD:
        total += tl.load(TO, mask=inside, other=0.0).to(tl.float32)
    tl.store(TO, total.to(TO.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_tokens", "padding"])
def word_backward_kernel(
    DROWS, RUNS, IDS, DWEIGHT, n_tokens, padding,
    N: tl.constexpr, BLOCK_N: tl.constexpr, LONG: tl.constexpr, PART: tl.constexpr, BY_RUN: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Program (i, c): a run that starts at the i-th token in sorted order. Most ids of a batch are rare: program (i, 0)
    adds up a short run, whole rows at a time. The few long ones are shared out by columns, many rows at a time."""
    i = tl.program_id(0)
    part = tl.program_id(1)
    length = tl.load(RUNS + n_tokens + i)
    if length > 0:
        token = tl.load(IDS + tl.load(RUNS + i))
        if token != padding:
            if BY_RUN:
                to = i.to(tl.int64)
            else:
                to = token
            if length > LONG:
                cols = part * PART + tl.arange(0, PART)
                total = add_up_run(DROWS, RUNS, i, length, cols, N, 32, PART)
                store_row(DWEIGHT + to * N + cols, total, cols < N, ADD)
            elif part == 0:
                cols = tl.arange(0, BLOCK_N)
                total = add_up_run(DROWS, RUNS, i, length, cols, N, 2, BLOCK_N)
                store_row(DWEIGHT + to * N + cols, total, cols < N, ADD)


@triton.jit(do_not_specialize=["n_documents", "offset"])
def position_backward_kernel(
    DROWS, CU_SEQLENS, DWEIGHT, n_documents, offset, N: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Program r: row r of the table is position r - offset of every document long enough. A thread keeps its columns
    to itself; rows of several documents are on their way at a time."""
    row = tl.program_id(0)
    position = row - offset
    cols = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, n_documents, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            document = first + i
            real = document < n_documents
            begin = tl.load(CU_SEQLENS + document, mask=real, other=0)
            end = tl.load(CU_SEQLENS + document + 1, mask=real, other=0)
            has = real & (position >= 0) & (begin + position < end)
            place = (begin + position).to(tl.int64) * N
            total += tl.load(DROWS + place + cols, mask=has & (cols < N), other=0.0).to(tl.float32)
    tl.store(DWEIGHT + row * N + cols, total.to(DWEIGHT.dtype.element_ty), mask=cols < N)


settle_keys(globals())
