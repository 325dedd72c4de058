"""The Triton half of `adamw8`: one block of a parameter from codes to codes.

A program takes one block of the flat buffer, eight strips of 256, and updates it as `adamw_triton.update_block` does.
BLOCKS and GRADIENTS are those of `adamw_triton`; MINE lists the blocks of this sort, and moments stand in that order.
"""

import triton
import triton.language as tl

from automodel.kernels import adamw, adamw8
from automodel.kernels.adamw_triton import gradient_pointer, whole_vectors
from automodel.kernels.triton_keys import settle_keys

SETTINGS = tl.constexpr(len(adamw.SETTINGS))
SIGNED_ZERO = tl.constexpr(adamw8.SIGNED_ZERO)
SIGNED_ONE = tl.constexpr(adamw8.SIGNED_ONE)
UNSIGNED_ONE = tl.constexpr(adamw8.UNSIGNED_ONE)
LOWER_SIGNED = tl.constexpr(tuple(adamw8.lower_bounds(signed=True)))
LOWER_UNSIGNED = tl.constexpr(tuple(adamw8.lower_bounds(signed=False)))
EXPONENT = tl.constexpr(0x7F800000)  # of a positive fp32 number
INVERSE = tl.constexpr(0x7F000000)  # exponents of x and 1/x add up to this
TINIEST = tl.constexpr(1.2e-38)  # below, fp32 has no inverse
TENS = tl.constexpr(tuple(10.0 ** (decade - adamw8.DECADES + 1) for decade in range(adamw8.DECADES)))


@triton.jit
def magnitude_of(j, SIGNED: tl.constexpr):
    """The entry of the book at distance j from 0."""
    # j, or j + 1, is 2ⁱ + k: as a floating-point number its exponent is the decade and its mantissa the interval.
    n = j.to(tl.float32)
    if not SIGNED:
        n = (n + 1.0) * 0.5
    exponent = n.to(tl.int32, bitcast=True) & EXPONENT
    whole = exponent.to(tl.float32, bitcast=True)
    inverse = (-exponent + INVERSE).to(tl.float32, bitcast=True)
    ten = tl.full(j.shape, TENS[0], tl.float32)
    for decade in tl.static_range(1, 7):
        ten = tl.where(n >= 2**decade, TENS[decade], ten)
    half = 0.5 if SIGNED else 0.25
    value = ten * (0.1 + 0.9 * ((n - whole + half) * inverse))
    ONE: tl.constexpr = SIGNED_ONE if SIGNED else UNSIGNED_ONE
    return tl.where(j == 0, 0.0, tl.where(j == ONE, 1.0, value))


@triton.jit
def distance_of(share, SIGNED: tl.constexpr):
    """How far from 0 the nearest entry of the book stands; share is a magnitude up to 1."""
    LOWER: tl.constexpr = LOWER_SIGNED if SIGNED else LOWER_UNSIGNED
    each_ten = tl.full(share.shape, 1.0 / TENS[0], tl.float32)
    count = tl.full(share.shape, 1.0 if SIGNED else 2.0, tl.float32)
    for decade in tl.static_range(1, 7):
        each_ten = tl.where(share >= LOWER[decade], 1.0 / TENS[decade], each_ten)
        count = tl.where(share >= LOWER[decade], 2.0**decade * (1.0 if SIGNED else 2.0), count)
    k = tl.floor((share * each_ten - 0.1) * (1.0 / 0.9) * count)
    k = tl.minimum(tl.maximum(k, 0.0), count - 1.0)
    j = (count + k).to(tl.int32)
    if not SIGNED:
        j -= 1
    ONE: tl.constexpr = SIGNED_ONE if SIGNED else UNSIGNED_ONE
    return tl.where(share < LOWER[0], 0, tl.where(share >= LOWER[7], ONE, j))


@triton.jit
def strip_scale(values):
    """(largest magnitude of each strip, what to multiply by to make that 1)."""
    scale = tl.max(tl.abs(values), axis=1)
    return scale, (1.0 / tl.maximum(scale, TINIEST))[:, None]


@triton.jit
def block_gradient(
    address, at, lanes, real, wide, NARROW: tl.constexpr, WIDE: tl.constexpr, ZERO: tl.constexpr
):  # fmt: skip
    gradient = tl.zeros(lanes.shape, tl.float32)
    if NARROW is not None:
        here = tl.where(wide == 0, real, 0)
        pointers = gradient_pointer(address, NARROW) + at
        loaded = tl.load(pointers, mask=lanes < whole_vectors(here, NARROW), other=0.0)
        gradient += tl.where(lanes < here, loaded.to(tl.float32), 0.0)
        if ZERO:
            tl.store(pointers, tl.zeros(lanes.shape, NARROW), mask=lanes < whole_vectors(here, NARROW))
    if WIDE:
        here = tl.where(wide != 0, real, 0)
        pointers = gradient_pointer(address, tl.float32) + at
        loaded = tl.load(pointers, mask=lanes < whole_vectors(here, tl.float32), other=0.0)
        gradient += tl.where(lanes < here, loaded, 0.0)
        if ZERO:
            tl.store(pointers, tl.zeros(lanes.shape, tl.float32), mask=lanes < whole_vectors(here, tl.float32))
    return gradient


@triton.jit(do_not_specialize=["n_blocks"])
def update8_kernel(
    WEIGHT, EXP_AVG, EXP_AVG_SQ, SCALE, SCALE_SQ, COPY, GRADIENTS, BLOCKS, MINE, TABLE, n_blocks,
    BLOCK: tl.constexpr, STRIP: tl.constexpr, EIGHT: tl.constexpr,
    NARROW: tl.constexpr, WIDE: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """EIGHT: the moments are codes, with scales; else they are fp32 and there are none."""
    STRIPS: tl.constexpr = BLOCK // STRIP
    program = tl.program_id(0)
    block = tl.load(MINE + program)
    strips = tl.arange(0, STRIPS)
    lanes = strips[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    own = program.to(tl.int64) * BLOCK + lanes
    flat = block.to(tl.int64) * BLOCK + lanes
    weight = tl.load(WEIGHT + flat, eviction_policy="evict_first").to(tl.float32)
    if EIGHT:
        scales = program.to(tl.int64) * STRIPS + strips
        code = tl.load(EXP_AVG + own, eviction_policy="evict_first").to(tl.int32) - SIGNED_ZERO
        value = magnitude_of(tl.abs(code), True)
        exp_avg = tl.where(code < 0, -value, value) * tl.load(SCALE + scales)[:, None]
        code_sq = tl.load(EXP_AVG_SQ + own, eviction_policy="evict_first").to(tl.int32)
        exp_avg_sq = magnitude_of(code_sq, False) * tl.load(SCALE_SQ + scales)[:, None]
    else:
        exp_avg = tl.load(EXP_AVG + own, eviction_policy="evict_first")
        exp_avg_sq = tl.load(EXP_AVG_SQ + own, eviction_policy="evict_first")

    offset = tl.multiple_of(tl.load(BLOCKS + n_blocks + block), 16)
    real = tl.load(BLOCKS + 2 * n_blocks + block)
    table = TABLE + tl.load(BLOCKS + 3 * n_blocks + block) * SETTINGS
    wide = tl.load(BLOCKS + 4 * n_blocks + block)
    address = tl.load(GRADIENTS + tl.load(BLOCKS + block))
    clip = tl.load(table + 7)
    real = tl.where(address != 0, real, 0)
    gradient = block_gradient(address, offset + lanes, lanes, real, wide, NARROW, WIDE, ZERO) * clip

    exp_avg += tl.load(table + 2) * (gradient - exp_avg)
    exp_avg_sq = tl.load(table + 3) * exp_avg_sq + tl.load(table + 4) * gradient * gradient
    denominator = tl.sqrt(exp_avg_sq) * tl.load(table + 5) + tl.load(table + 6)
    weight = weight * tl.load(table) - tl.load(table + 1) * exp_avg / denominator

    # −1 skips the step; a NaN goes through, as in torch. Padding stays zero, so it may be written along.
    goes = (real > 0) & (tl.where(clip < 0.0, 0, 1) != 0)
    changed = lanes < tl.where(goes, BLOCK, 0)
    tl.store(WEIGHT + flat, weight.to(WEIGHT.dtype.element_ty), mask=changed, eviction_policy="evict_first")
    if COPY is not None:
        tl.store(COPY + flat, weight.to(COPY.dtype.element_ty), mask=changed)
    if EIGHT:
        scaled = strips < tl.where(goes, STRIPS, 0)
        scale, inverse = strip_scale(exp_avg)
        j = distance_of(tl.abs(exp_avg) * inverse, True)
        code = SIGNED_ZERO + tl.where(exp_avg < 0, -tl.minimum(j, SIGNED_ZERO), j)
        tl.store(EXP_AVG + own, code.to(tl.uint8), mask=changed, eviction_policy="evict_first")
        tl.store(SCALE + scales, scale, mask=scaled)
        scale_sq, inverse_sq = strip_scale(exp_avg_sq)
        code_sq = distance_of(exp_avg_sq * inverse_sq, False)
        code_sq = tl.where((exp_avg_sq > 0.0) & (code_sq == 0), 1, code_sq)
        tl.store(EXP_AVG_SQ + own, code_sq.to(tl.uint8), mask=changed, eviction_policy="evict_first")
        tl.store(SCALE_SQ + scales, scale_sq, mask=scaled)
    else:
        tl.store(EXP_AVG + own, exp_avg, mask=changed, eviction_policy="evict_first")
        tl.store(EXP_AVG_SQ + own, exp_avg_sq, mask=changed, eviction_policy="evict_first")


settle_keys(globals())
