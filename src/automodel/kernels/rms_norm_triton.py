"""The Triton half of `rms_norm`. T rows of width D, one at a time. An absent input is passed as None."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_forward_kernel(
    X, RESIDUAL, WEIGHT, Y, SUM, RSTD, x_stride, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    inside = cols < D
    at = row * D + cols

    h = tl.load(X + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL is not None:
        h += tl.load(RESIDUAL + at, mask=inside, other=0.0).to(tl.float32)
        # The next layers and the backward pass see the stored, rounded sum: normalise that one.
        rounded = h.to(SUM.dtype.element_ty)
        tl.store(SUM + at, rounded, mask=inside)
        h = rounded.to(tl.float32)

    rstd = tl.rsqrt(tl.sum(h * h, axis=0) / D + eps)
    tl.store(RSTD + row, rstd)
    normed = h * rstd
    if ROUND_FIRST:
        normed = normed.to(Y.dtype.element_ty).to(tl.float32)
    weight = tl.load(WEIGHT + cols, mask=inside, other=0.0).to(tl.float32) + OFFSET
    tl.store(Y + at, (normed * weight).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def rms_norm_backward_kernel(
    DY, DSUM, SUM, WEIGHT, RSTD, DX, PARTIAL, n_rows, sum_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OFFSET: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program walks over rows and keeps the sums of the weight gradient in registers: no atomics."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    inside = cols < D
    weight = tl.load(WEIGHT + cols, mask=inside, other=0.0).to(tl.float32) + OFFSET
    weight_sum = tl.zeros((BLOCK_D,), tl.float32)

    for index in tl.range(program, n_rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(index, tl.int64)
        at = row * D + cols
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(SUM + row * sum_stride + cols, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)

        normed = h * rstd
        scaled_dy = dy * weight
        along = tl.sum(normed * scaled_dy, axis=0) / D
        dh = (scaled_dy - normed * along) * rstd
        if DSUM is not None:
            dh += tl.load(DSUM + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + at, dh.to(DX.dtype.element_ty), mask=inside)
        if PARTIAL is not None:
            weight_sum += dy * normed

    if PARTIAL is not None:
        tl.store(PARTIAL + program * D + cols, weight_sum, mask=inside)
