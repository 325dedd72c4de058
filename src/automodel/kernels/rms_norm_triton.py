"""The Triton half of `rms_norm`.

T rows of width D. A program takes a tile of ROWS rows with its warps spread along the row, so that a thread holds the
same columns of all rows and the sums over rows (the weight gradient) stay inside it. An absent input is passed as None.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_rows"])
def rms_norm_forward_kernel(
    X, RESIDUAL, WEIGHT, Y, SUM, RSTD, n_rows, x_stride, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    in_row = cols < D
    inside = (rows < n_rows)[:, None] & in_row[None, :]
    row = rows.to(tl.int64)[:, None]
    at = row * D + cols[None, :]

    h = tl.load(X + row * x_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL is not None:
        h += tl.load(RESIDUAL + at, mask=inside, other=0.0).to(tl.float32)
        # The next layers and the backward pass see the stored, rounded sum: normalise that one.
        rounded = h.to(SUM.dtype.element_ty)
        tl.store(SUM + at, rounded, mask=inside)
        h = rounded.to(tl.float32)

    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / D + eps)
    tl.store(RSTD + rows, rstd, mask=rows < n_rows)
    normed = h * rstd[:, None]
    if ROUND_FIRST:
        normed = normed.to(Y.dtype.element_ty).to(tl.float32)
    weight = tl.load(WEIGHT + cols, mask=in_row, other=0.0).to(tl.float32) + OFFSET
    tl.store(Y + at, (normed * weight[None, :]).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def rms_norm_backward_kernel(
    DY, DSUM, SUM, WEIGHT, RSTD, DX, PARTIAL, n_rows, n_tiles, sum_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program walks over tiles and keeps the sums of the weight gradient in registers: no atomics."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    in_row = cols < D
    weight = (tl.load(WEIGHT + cols, mask=in_row, other=0.0).to(tl.float32) + OFFSET)[None, :]
    weight_sum = tl.zeros((BLOCK_D,), tl.float32)

    for tile in tl.range(program, n_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & in_row[None, :]
        row = rows.to(tl.int64)[:, None]
        at = row * D + cols[None, :]
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(SUM + row * sum_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + rows, mask=rows < n_rows, other=0.0)[:, None]

        normed = h * rstd
        scaled_dy = dy * weight
        along = tl.sum(normed * scaled_dy, axis=1)[:, None] / D
        dh = (scaled_dy - normed * along) * rstd
        if DSUM is not None:
            dh += tl.load(DSUM + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + at, dh.to(DX.dtype.element_ty), mask=inside)
        if PARTIAL is not None:
            weight_sum += tl.sum(dy * normed, axis=0)

    if PARTIAL is not None:
        tl.store(PARTIAL + program * D + cols, weight_sum, mask=in_row)
