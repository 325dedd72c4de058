"""The Triton half of `lazy_rows`: one program for one row of the table."""

import triton
import triton.language as tl

from automodel.kernels.triton_keys import settle_keys

AT_ONCE = tl.constexpr(8)


@triton.jit
def trained_row(IDS, RUNS, i, n_tokens, padding):
    """The row of the run that starts at the i-th token in sorted order; -1 where none starts, or nobody trains it."""
    length = tl.load(RUNS + n_tokens + i)
    row = tl.load(IDS + tl.load(RUNS + i))
    return tl.where((length > 0) & (row != padding), row, -1)


@triton.jit(do_not_specialize=["n_rows"])
def idle_steps_kernel(
    WEIGHT, EXP_AVG, EXP_AVG_SQ, COPY, LAST, STEP, TABLE, HISTORY, IDS, RUNS, n_rows,
    N: tl.constexpr, BLOCK_N: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Without IDS and RUNS, program r takes row r; with them, the row of the run that starts at r."""
    row = tl.program_id(0).to(tl.int64)
    if IDS is not None:
        row = trained_row(IDS, RUNS, row, n_rows, -1)
    if row >= 0:
        first = tl.load(LAST + row)
        now = tl.load(STEP)
        if first < now:
            cols = tl.arange(0, BLOCK_N)
            inside = cols < N
            at = row * N + cols
            p = tl.load(WEIGHT + at, mask=inside, other=0.0).to(tl.float32)
            m = tl.load(EXP_AVG + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(EXP_AVG_SQ + at, mask=inside, other=0.0).to(tl.float32)
            one_minus_beta1 = tl.load(TABLE + 2)
            beta2 = tl.load(TABLE + 3)
            eps = tl.load(TABLE + 6)
            # Several steps of history are on their way at a time; the arithmetic alone is short.
            if tl.max(tl.abs(m), axis=0) == 0.0:  # never trained yet, or long forgotten: only the weight decay is left
                for base in range(first, now, AT_ONCE):
                    for i in tl.static_range(AT_ONCE):
                        shrink = tl.load(HISTORY + ((base + i) % RING) * 3, mask=base + i < now, other=1.0)
                        p = (p * shrink).to(WEIGHT.dtype.element_ty).to(tl.float32)
                        forget = tl.where(base + i < now, beta2, 1.0)
                        v = (forget * v).to(WEIGHT.dtype.element_ty).to(tl.float32)
            else:
                for base in range(first, now, AT_ONCE):
                    for i in tl.static_range(AT_ONCE):
                        settings = HISTORY + ((base + i) % RING) * 3
                        real = base + i < now
                        shrink = tl.load(settings, mask=real, other=1.0)
                        step_size = tl.load(settings + 1, mask=real, other=0.0)
                        correction = tl.load(settings + 2, mask=real, other=1.0)
                        m += tl.where(real, one_minus_beta1, 0.0) * (0.0 - m)
                        v = tl.where(real, beta2, 1.0) * v
                        p = p * shrink - step_size * m / (tl.sqrt(v) * correction + eps)
                        # What the plain update would have stored in between.
                        p = p.to(WEIGHT.dtype.element_ty).to(tl.float32)
                        m = m.to(WEIGHT.dtype.element_ty).to(tl.float32)
                        v = v.to(WEIGHT.dtype.element_ty).to(tl.float32)
            tl.store(WEIGHT + at, p.to(WEIGHT.dtype.element_ty), mask=inside)
            tl.store(EXP_AVG + at, m.to(WEIGHT.dtype.element_ty), mask=inside)
            tl.store(EXP_AVG_SQ + at, v.to(WEIGHT.dtype.element_ty), mask=inside)
            if COPY is not None:
                tl.store(COPY + at, p.to(COPY.dtype.element_ty), mask=inside)
            tl.store(LAST + row, now)


@triton.jit(do_not_specialize=["n_tokens", "padding"])
def row_squares_kernel(
    ROWS_TN, IDS, RUNS, PARTIAL, n_tokens, padding, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr
):
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = places < n_tokens
    length = tl.load(RUNS + n_tokens + places, mask=exists, other=0)
    row = tl.load(IDS + tl.load(RUNS + places, mask=exists, other=0), mask=exists, other=0)
    trained = exists & (length > 0) & (row != padding)
    cols = tl.arange(0, BLOCK_N)
    inside = trained[:, None] & (cols < N)[None, :]
    g = tl.load(ROWS_TN + places.to(tl.int64)[:, None] * N + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(PARTIAL + tl.program_id(0), tl.sum(tl.sum(g * g, axis=1), axis=0))


@triton.jit(do_not_specialize=["n_tokens", "padding"])
def update_rows_kernel(
    WEIGHT, EXP_AVG, EXP_AVG_SQ, COPY, LAST, STEP, TABLE, ROWS_TN, IDS, RUNS, n_tokens, padding,
    N: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = trained_row(IDS, RUNS, i, n_tokens, padding)
    clip = tl.load(TABLE + 7)
    # −1 skips the step; a NaN goes through, as in torch.
    if (row >= 0) & (tl.where(clip < 0.0, 0, 1) != 0):
        cols = tl.arange(0, BLOCK_N)
        inside = cols < N
        at = row * N + cols
        p = tl.load(WEIGHT + at, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(EXP_AVG + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(EXP_AVG_SQ + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(ROWS_TN + i * N + cols, mask=inside, other=0.0).to(tl.float32) * clip
        m += tl.load(TABLE + 2) * (g - m)
        v = tl.load(TABLE + 3) * v + tl.load(TABLE + 4) * g * g
        denominator = tl.sqrt(v) * tl.load(TABLE + 5) + tl.load(TABLE + 6)
        p = p * tl.load(TABLE) - tl.load(TABLE + 1) * m / denominator
        tl.store(WEIGHT + at, p.to(WEIGHT.dtype.element_ty), mask=inside)
        tl.store(EXP_AVG + at, m.to(WEIGHT.dtype.element_ty), mask=inside)
        tl.store(EXP_AVG_SQ + at, v.to(WEIGHT.dtype.element_ty), mask=inside)
        if COPY is not None:
            tl.store(COPY + at, p.to(COPY.dtype.element_ty), mask=inside)
        tl.store(LAST + row, tl.load(STEP))


settle_keys(globals())
