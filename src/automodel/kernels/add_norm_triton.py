"""The Triton half of `add_norm`: forward, backward, and the dropout bits both compute.

T rows of width D. A program takes a tile of ROWS rows with its warps spread along the row, so that a thread holds the
same columns of all rows: sums over the rows of a tile (the weight gradients) stay inside the thread, and the four words
of one Philox draw land in the four rows without moving between threads. An absent input is passed as None, which
Triton treats as a compile-time constant.
"""

import triton
import triton.language as tl

from automodel.kernels.philox import ROUNDS, THRESHOLD_BITS
from automodel.kernels.triton_keys import settle_keys

PHILOX_ROUNDS = tl.constexpr(ROUNDS)
WORD_SHIFT = tl.constexpr(32 - THRESHOLD_BITS)


@triton.jit
def dropout_keep(SEED, site, group, lane, cols, threshold, ROWS: tl.constexpr):
    """Which elements of a (ROWS, columns) tile are kept: all four rows of a draw, or row `lane` of them."""
    BLOCK_D: tl.constexpr = cols.shape[0]
    w0, w1, w2, w3 = tl.philox(tl.load(SEED), cols, group, site, 0, PHILOX_ROUNDS)
    if ROWS == 4:
        pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (D, 2, 2): word 2i + j at [:, i, j]
        words = tl.reshape(tl.permute(pairs, (1, 2, 0)), (4, BLOCK_D))
    else:
        word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
        words = word[None, :]
    return (words >> WORD_SHIFT).to(tl.int32) >= threshold


@triton.jit
def rows_at(ROWS_OF_TABLE, rows, n_rows, cols, D: tl.constexpr):
    """Offsets of the rows themselves, or of those that the list names for them."""
    if ROWS_OF_TABLE is not None:
        rows = tl.load(ROWS_OF_TABLE + rows, mask=rows < n_rows, other=0)
    return rows.to(tl.int64)[:, None] * D + cols[None, :]


@triton.jit(do_not_specialize=["n_rows", "site", "threshold"])
def add_norm_forward_kernel(
    X, X_ROWS, RESIDUAL, RESIDUAL_ROWS, LINEAR_BIAS, WEIGHT, NORM_BIAS, SEED, Y, SUM, MEAN, RSTD,
    n_rows, site, threshold, scale, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, DROP_LAST: tl.constexpr,
):  # fmt: skip
    """X_ROWS and RESIDUAL_ROWS: where X and RESIDUAL are tables, which of their rows to read. DROP_LAST: dropout after
    the norm, not before the sum."""
    tile = tl.program_id(0)
    rows = tile * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    in_row = cols < D
    inside = (rows < n_rows)[:, None] & in_row[None, :]
    at = rows.to(tl.int64)[:, None] * D + cols[None, :]

    h = tl.load(X + rows_at(X_ROWS, rows, n_rows, cols, D), mask=inside, other=0.0).to(tl.float32)
    if LINEAR_BIAS is not None:
        h += tl.load(LINEAR_BIAS + cols, mask=in_row, other=0.0).to(tl.float32)[None, :]
    if SEED is not None and not DROP_LAST:
        keep = dropout_keep(SEED, site, tile * ROWS // 4, tile * ROWS % 4, cols, threshold, ROWS)
        h = tl.where(keep, h * scale, 0.0)
    if RESIDUAL is not None:
        h += tl.load(RESIDUAL + rows_at(RESIDUAL_ROWS, rows, n_rows, cols, D), mask=inside, other=0.0).to(tl.float32)
    if SUM is not None:
        # The backward pass sees the stored, rounded sum: take the statistics of that one.
        rounded = h.to(SUM.dtype.element_ty)
        tl.store(SUM + at, rounded, mask=inside)
        h = rounded.to(tl.float32)

    mean = tl.sum(tl.where(inside, h, 0.0), axis=1) / D
    centered = tl.where(inside, h - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / D + eps)
    tl.store(MEAN + rows, mean, mask=rows < n_rows)
    tl.store(RSTD + rows, rstd, mask=rows < n_rows)
    y = centered * rstd[:, None] * tl.load(WEIGHT + cols, mask=in_row, other=0.0).to(tl.float32)[None, :]
    if NORM_BIAS is not None:
        y += tl.load(NORM_BIAS + cols, mask=in_row, other=0.0).to(tl.float32)[None, :]
    if DROP_LAST:
        keep = dropout_keep(SEED, site, tile * ROWS // 4, tile * ROWS % 4, cols, threshold, ROWS)
        y = tl.where(keep, y * scale, 0.0)
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_tiles", "site", "threshold"])
def add_norm_backward_kernel(
    DY, DSUM, SUM, WEIGHT, MEAN, RSTD, SEED, DX, DRESIDUAL, PARTIAL,
    n_rows, n_tiles, site, threshold, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    NORM_BIAS_SLOT: tl.constexpr, LINEAR_BIAS_SLOT: tl.constexpr, SLOTS: tl.constexpr, DROP_LAST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Each program walks over tiles and keeps the sums of the parameter gradients in registers: no atomics.

    PARTIAL is (programs, SLOTS, D): weight, then the norm's bias and the linear bias where they exist (slot 0: absent).
    """
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    in_row = cols < D
    weight = tl.load(WEIGHT + cols, mask=in_row, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros((BLOCK_D,), tl.float32)
    norm_bias_sum = tl.zeros((BLOCK_D,), tl.float32)
    linear_bias_sum = tl.zeros((BLOCK_D,), tl.float32)

    for tile in tl.range(program, n_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & in_row[None, :]
        at = rows.to(tl.int64)[:, None] * D + cols[None, :]
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        if DROP_LAST:
            keep = dropout_keep(SEED, site, tile * ROWS // 4, tile * ROWS % 4, cols, threshold, ROWS)
            dy = tl.where(keep, dy * scale, 0.0)
        h = tl.load(SUM + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(MEAN + rows, mask=rows < n_rows, other=0.0)[:, None]
        rstd = tl.load(RSTD + rows, mask=rows < n_rows, other=0.0)[:, None]

        normed = tl.where(inside, (h - mean) * rstd, 0.0)
        scaled_dy = dy * weight
        along = tl.sum(normed * scaled_dy, axis=1)[:, None] / D
        level = tl.sum(scaled_dy, axis=1)[:, None] / D
        dh = (scaled_dy - normed * along - level) * rstd
        if DSUM is not None:
            dh += tl.load(DSUM + at, mask=inside, other=0.0).to(tl.float32)
        if DRESIDUAL is not None:
            tl.store(DRESIDUAL + at, dh.to(DRESIDUAL.dtype.element_ty), mask=inside)
        dx = dh
        if SEED is not None and not DROP_LAST:
            keep = dropout_keep(SEED, site, tile * ROWS // 4, tile * ROWS % 4, cols, threshold, ROWS)
            dx = tl.where(keep, dh * scale, 0.0)
        if DX is not None:
            tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
        if PARTIAL is not None:
            weight_sum += tl.sum(dy * normed, axis=0)
            if NORM_BIAS_SLOT > 0:
                norm_bias_sum += tl.sum(dy, axis=0)
            if LINEAR_BIAS_SLOT > 0:
                linear_bias_sum += tl.sum(tl.where(inside, dx, 0.0), axis=0)

    if PARTIAL is not None:
        out = PARTIAL + program * SLOTS * D + cols
        tl.store(out, weight_sum, mask=in_row)
        if NORM_BIAS_SLOT > 0:
            tl.store(out + NORM_BIAS_SLOT * D, norm_bias_sum, mask=in_row)
        if LINEAR_BIAS_SLOT > 0:
            tl.store(out + LINEAR_BIAS_SLOT * D, linear_bias_sum, mask=in_row)


settle_keys(globals())
