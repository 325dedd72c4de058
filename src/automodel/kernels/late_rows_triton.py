"""The Triton half of `late_rows`."""

import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]


@triton.jit
def late_rows_kernel(
    WEIGHT, EXP_AVG, EXP_AVG_SQ, GRADIENT, SETTINGS, IDS, OUT, N: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program for each token and part of a row. The arithmetic is `update_kernel`'s, line by line."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < N
    at = tl.load(IDS + token) * N + cols
    weight = tl.load(WEIGHT + at, mask=inside, other=0.0).to(tl.float32)
    exp_avg = tl.load(EXP_AVG + at, mask=inside, other=0.0).to(tl.float32)
    exp_avg_sq = tl.load(EXP_AVG_SQ + at, mask=inside, other=0.0).to(tl.float32)
    clip = tl.load(SETTINGS + 7)
    gradient = tl.load(GRADIENT + at, mask=inside, other=0.0).to(tl.float32)

    gradient *= clip
    exp_avg += tl.load(SETTINGS + 2) * (gradient - exp_avg)
    exp_avg_sq = tl.load(SETTINGS + 3) * exp_avg_sq + tl.load(SETTINGS + 4) * gradient * gradient
    denominator = tl.sqrt(exp_avg_sq) * tl.load(SETTINGS + 5) + tl.load(SETTINGS + 6)
    updated = weight * tl.load(SETTINGS) - tl.load(SETTINGS + 1) * exp_avg / denominator

    # −1 skips the step; a NaN goes through, as in the update.
    weight = tl.where(clip < 0.0, weight, updated)
    tl.store(OUT + token * N + cols, weight.to(OUT.dtype.element_ty), mask=inside)
