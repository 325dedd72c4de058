"""The Triton half of `adamw`: squared sums of the gradients, the settings of the step, the update itself.

Parameters stand in flat buffers, each padded to whole blocks (`flat_parameters.py`), so a block belongs to one
parameter and one group. Gradients stay where autograd put them: GRADIENTS holds the address of each, 0 where there is
none. BLOCKS is (5, n_blocks): parameter, offset inside it, real elements, group, and whether its gradient is fp32.
"""

import triton
import triton.language as tl

from automodel.kernels import adamw
from automodel.kernels.triton_keys import settle_keys

HYPERS = tl.constexpr(len(adamw.HYPER))
SETTINGS = tl.constexpr(len(adamw.SETTINGS))
NORM_EPS = tl.constexpr(adamw.NORM_EPS)
GROWTH = tl.constexpr(adamw.GROWTH)
BACKOFF = tl.constexpr(adamw.BACKOFF)
GROWTH_INTERVAL = tl.constexpr(adamw.GROWTH_INTERVAL)


@triton.jit
def gradient_pointer(address, DTYPE: tl.constexpr):
    """The host made sure that gradients are aligned to 16 bytes; the hint makes wide loads of it."""
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def whole_vectors(real, DTYPE: tl.constexpr):
    """Elements to load for `real` ones: to the end of the last 16 bytes, or the mask would split every load.

    Those last bytes belong to the same aligned unit as real ones, so reading them is safe; they are discarded.
    """
    PER_LOAD: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    return (real + PER_LOAD - 1) // PER_LOAD * PER_LOAD


@triton.jit(do_not_specialize=["n_blocks", "n_chosen"])
def square_sums_kernel(
    GRADIENTS, BLOCKS, CHOSEN, PARTIAL, n_blocks, n_chosen,
    BLOCK: tl.constexpr, PER_PROGRAM: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A few programs walk over all blocks, so that few sums are left to add up. CHOSEN: the blocks, None for all;
    NARROW is the 16-bit dtype some gradients have, or None; WIDE whether some are fp32."""
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((PER_PROGRAM, BLOCK), tl.float32)
    for first in range(program * PER_PROGRAM, n_chosen, tl.num_programs(0) * PER_PROGRAM):
        blocks = first + tl.arange(0, PER_PROGRAM)
        exists = blocks < n_chosen
        if CHOSEN is not None:
            blocks = tl.load(CHOSEN + blocks, mask=exists, other=0)
        parameter = tl.load(BLOCKS + blocks, mask=exists, other=0)
        offset = tl.load(BLOCKS + n_blocks + blocks, mask=exists, other=0)
        real = tl.load(BLOCKS + 2 * n_blocks + blocks, mask=exists, other=0)
        wide = tl.load(BLOCKS + 4 * n_blocks + blocks, mask=exists, other=0)
        address = tl.load(GRADIENTS + parameter, mask=exists, other=0)
        real = tl.where(address != 0, real, 0)
        at = tl.multiple_of(offset, 16)[:, None] + lanes
        if NARROW is not None:
            here = tl.where(wide == 0, real, 0)
            pointers = gradient_pointer(address, NARROW)[:, None] + at
            loaded = tl.load(pointers, mask=lanes < whole_vectors(here, NARROW)[:, None], other=0.0)
            g = tl.where(lanes < here[:, None], loaded.to(tl.float32), 0.0)
            total += g * g
        if WIDE:
            here = tl.where(wide != 0, real, 0)
            pointers = gradient_pointer(address, tl.float32)[:, None] + at
            loaded = tl.load(pointers, mask=lanes < whole_vectors(here, tl.float32)[:, None], other=0.0)
            g = tl.where(lanes < here[:, None], loaded, 0.0)
            total += g * g
    tl.store(PARTIAL + program, tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit(do_not_specialize=["n_partials", "n_row_partials", "n_groups", "n_factors"])
def prepare_kernel(
    PARTIAL, ROW_PARTIAL, HISTORY, HYPER, POWERS, STEP, SKIPPED, LR_FACTORS, LOSS_SCALE, TABLE, NORM,
    n_partials, n_row_partials, n_groups, n_factors, max_norm,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, SKIP: tl.constexpr, LAZY_GROUP: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """One program: the norm, the clip coefficient, the step count, and the settings of every group."""
    clip = tl.full((), 1.0, tl.float64)
    go = tl.full((), 1, tl.int64)
    scale = tl.full((), 1.0, tl.float64)
    if LOSS_SCALE is not None:
        scale = tl.load(LOSS_SCALE).to(tl.float64)
    if PARTIAL is not None:
        total = tl.zeros((BLOCK,), tl.float64)
        for first in range(0, n_partials, BLOCK):
            at = first + tl.arange(0, BLOCK)
            total += tl.load(PARTIAL + at, mask=at < n_partials, other=0.0).to(tl.float64)
        if ROW_PARTIAL is not None:
            for first in range(0, n_row_partials, BLOCK):
                at = first + tl.arange(0, BLOCK)
                total += tl.load(ROW_PARTIAL + at, mask=at < n_row_partials, other=0.0).to(tl.float64)
        norm = tl.sqrt(tl.sum(total, axis=0)) / scale
        tl.store(NORM, norm.to(tl.float32))
        ratio = max_norm / (norm + NORM_EPS)
        clip = tl.where(ratio > 1.0, 1.0, ratio)  # keeps NaN, as clamp does
        if SKIP:
            go = (norm < float("inf")).to(tl.int64)
            tl.store(SKIPPED, tl.load(SKIPPED) + 1 - go)
    clip = tl.where(go > 0, clip / scale, -1.0)
    if LOSS_SCALE is not None:
        good = tl.where(go > 0, tl.load(LOSS_SCALE + 1) + 1.0, 0.0)
        grown = tl.where(good >= GROWTH_INTERVAL, scale * GROWTH, scale)
        tl.store(LOSS_SCALE, tl.where(go > 0, grown, scale * BACKOFF).to(tl.float32))
        tl.store(LOSS_SCALE + 1, tl.where(good >= GROWTH_INTERVAL, 0.0, good))

    step = tl.load(STEP)
    tl.store(STEP, step + go)
    group = tl.arange(0, GROUPS)
    mine = group < n_groups
    hyper = HYPER + group * HYPERS
    lr = tl.load(hyper, mask=mine, other=0.0)
    if LR_FACTORS is not None:
        lr *= tl.load(LR_FACTORS + tl.minimum(step + tl.load(SKIPPED), n_factors - 1))
    beta1 = tl.load(hyper + 1, mask=mine, other=0.0)
    beta2 = tl.load(hyper + 2, mask=mine, other=0.0)
    eps = tl.load(hyper + 3, mask=mine, other=0.0)
    decay = tl.load(hyper + 4, mask=mine, other=0.0)
    power1 = tl.load(POWERS + group * 2, mask=mine, other=0.0)
    power2 = tl.load(POWERS + group * 2 + 1, mask=mine, other=0.0)
    power1 = tl.where(go > 0, power1 * beta1, power1)
    power2 = tl.where(go > 0, power2 * beta2, power2)
    tl.store(POWERS + group * 2, power1, mask=mine)
    tl.store(POWERS + group * 2 + 1, power2, mask=mine)
    table = TABLE + group * SETTINGS
    tl.store(table, (1.0 - lr * decay).to(tl.float32), mask=mine)
    tl.store(table + 1, (lr / (1.0 - power1)).to(tl.float32), mask=mine)
    tl.store(table + 2, (1.0 - beta1).to(tl.float32), mask=mine)
    tl.store(table + 3, beta2.to(tl.float32), mask=mine)
    tl.store(table + 4, (1.0 - beta2).to(tl.float32), mask=mine)
    tl.store(table + 5, (1.0 / tl.sqrt(1.0 - power2)).to(tl.float32), mask=mine)
    tl.store(table + 6, eps.to(tl.float32), mask=mine)
    tl.store(table + 7, tl.zeros_like(lr).to(tl.float32) + clip.to(tl.float32), mask=mine)
    if HISTORY is not None:
        lazy = (group == LAZY_GROUP) & (go > 0)
        past = HISTORY + (step % RING) * 3 + group * 0
        tl.store(past, (1.0 - lr * decay).to(tl.float32), mask=lazy)
        tl.store(past + 1, (lr / (1.0 - power1)).to(tl.float32), mask=lazy)
        tl.store(past + 2, (1.0 / tl.sqrt(1.0 - power2)).to(tl.float32), mask=lazy)


@triton.jit(do_not_specialize=["n_blocks"])
def update_kernel(
    WEIGHT, EXP_AVG, EXP_AVG_SQ, COPY, GRADIENTS, BLOCKS, CHOSEN, TABLE, n_blocks,
    BLOCK: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """A program for each block, or for each of those that CHOSEN lists."""
    block = tl.program_id(0)
    if CHOSEN is not None:
        block = tl.load(CHOSEN + block)
    # As many elements a thread for every buffer: 16 bytes of weights and moments, 8 of bf16 gradients beside fp32 ones.
    # Left to choose, Triton takes 16 of those as well, and exchanges every fp32 result between threads to store it.
    TOGETHER: tl.constexpr = 128 // WEIGHT.dtype.element_ty.primitive_bitwidth
    lanes = tl.max_contiguous(tl.arange(0, BLOCK), TOGETHER)
    flat = tl.max_contiguous(block.to(tl.int64) * BLOCK + lanes, TOGETHER)
    # The buffers are padded, so these loads need no mask and do not wait for the tables.
    # Nobody reads these again in this step: they should not push activations out of the cache.
    weight = tl.load(WEIGHT + flat, eviction_policy="evict_first").to(tl.float32)
    exp_avg = tl.load(EXP_AVG + flat, eviction_policy="evict_first").to(tl.float32)
    exp_avg_sq = tl.load(EXP_AVG_SQ + flat, eviction_policy="evict_first").to(tl.float32)

    parameter = tl.load(BLOCKS + block)
    at = tl.max_contiguous(tl.multiple_of(tl.load(BLOCKS + n_blocks + block), 16) + lanes, TOGETHER)
    real = tl.load(BLOCKS + 2 * n_blocks + block)
    table = TABLE + tl.load(BLOCKS + 3 * n_blocks + block) * SETTINGS
    wide = tl.load(BLOCKS + 4 * n_blocks + block)
    address = tl.load(GRADIENTS + parameter)
    clip = tl.load(table + 7)
    real = tl.where(address != 0, real, 0)
    gradient = tl.zeros((BLOCK,), tl.float32)
    if NARROW is not None:
        here = tl.where(wide == 0, real, 0)
        pointers = gradient_pointer(address, NARROW) + at
        loaded = tl.load(pointers, mask=lanes < whole_vectors(here, NARROW), other=0.0)
        gradient += tl.where(lanes < here, loaded.to(tl.float32), 0.0)
        if ZERO:  # only gradients in our own padded buffers are zeroed
            tl.store(pointers, tl.zeros((BLOCK,), NARROW), mask=lanes < whole_vectors(here, NARROW))
    if WIDE:
        here = tl.where(wide != 0, real, 0)
        pointers = gradient_pointer(address, tl.float32) + at
        loaded = tl.load(pointers, mask=lanes < whole_vectors(here, tl.float32), other=0.0)
        gradient += tl.where(lanes < here, loaded, 0.0)
        if ZERO:
            tl.store(pointers, tl.zeros((BLOCK,), tl.float32), mask=lanes < whole_vectors(here, tl.float32))

    gradient *= clip
    exp_avg += tl.load(table + 2) * (gradient - exp_avg)
    exp_avg_sq = tl.load(table + 3) * exp_avg_sq + tl.load(table + 4) * gradient * gradient
    denominator = tl.sqrt(exp_avg_sq) * tl.load(table + 5) + tl.load(table + 6)
    weight = weight * tl.load(table) - tl.load(table + 1) * exp_avg / denominator

    # −1 skips the step; a NaN goes through, as in torch. Padding stays zero, so it may be written along.
    changed = lanes < tl.where((real > 0) & (tl.where(clip < 0.0, 0, 1) != 0), BLOCK, 0)
    tl.store(WEIGHT + flat, weight.to(WEIGHT.dtype.element_ty), mask=changed, eviction_policy="evict_first")
    tl.store(EXP_AVG + flat, exp_avg.to(EXP_AVG.dtype.element_ty), mask=changed, eviction_policy="evict_first")
    tl.store(EXP_AVG_SQ + flat, exp_avg_sq.to(EXP_AVG_SQ.dtype.element_ty), mask=changed, eviction_policy="evict_first")
    if COPY is not None:
        tl.store(COPY + flat, weight.to(COPY.dtype.element_ty), mask=changed)


@triton.jit(do_not_specialize=["n_blocks"])
def square_run_kernel(
    GRADIENT, PARTIAL, n_blocks, BLOCK: tl.constexpr, WALK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Squared sums of a gradient of whole blocks, or of several that lie side by side."""
    program, count = tl.program_id(0), n_blocks.to(tl.int64) * BLOCK
    lanes = tl.arange(0, WALK)
    total = tl.zeros((WALK,), tl.float32)
    for first in tl.range(program.to(tl.int64) * WALK, count, tl.num_programs(0) * WALK, num_stages=STAGES):
        g = tl.load(GRADIENT + first + lanes, mask=first + lanes < count, other=0.0).to(tl.float32)
        total += g * g
    tl.store(PARTIAL + program, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["n_blocks"])
def update_run_kernel(
    WEIGHT, EXP_AVG, EXP_AVG_SQ, COPY, GRADIENT, TABLE, n_blocks, BLOCK: tl.constexpr, WALK: tl.constexpr
):  # fmt: skip
    """`update_kernel` for one run: all arguments begin with it, TABLE is its group's row. Fewer programs than pieces of
    WALK elements walk over them."""
    shrink, step_size = tl.load(TABLE), tl.load(TABLE + 1)
    one_minus_beta1, beta2, one_minus_beta2 = tl.load(TABLE + 2), tl.load(TABLE + 3), tl.load(TABLE + 4)
    inv_sqrt_correction2, eps, clip = tl.load(TABLE + 5), tl.load(TABLE + 6), tl.load(TABLE + 7)
    # −1 skips the step; a NaN goes through, as in torch.
    count = tl.where(clip < 0.0, 0, n_blocks.to(tl.int64)) * BLOCK
    lanes = tl.arange(0, WALK)
    # Loads ahead (num_stages=3) win nothing here: the warps of a program drift apart, and load for each other.
    for first in tl.range(tl.program_id(0).to(tl.int64) * WALK, count, tl.num_programs(0) * WALK, num_stages=1):
        at = first + lanes
        mine = at < count
        weight = tl.load(WEIGHT + at, mask=mine, eviction_policy="evict_first").to(tl.float32)
        exp_avg = tl.load(EXP_AVG + at, mask=mine, eviction_policy="evict_first").to(tl.float32)
        exp_avg_sq = tl.load(EXP_AVG_SQ + at, mask=mine, eviction_policy="evict_first").to(tl.float32)
        gradient = tl.load(GRADIENT + at, mask=mine, eviction_policy="evict_first").to(tl.float32) * clip
        exp_avg += one_minus_beta1 * (gradient - exp_avg)
        exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * gradient * gradient
        denominator = tl.sqrt(exp_avg_sq) * inv_sqrt_correction2 + eps
        weight = weight * shrink - step_size * exp_avg / denominator
        tl.store(WEIGHT + at, weight.to(WEIGHT.dtype.element_ty), mask=mine, eviction_policy="evict_first")
        tl.store(EXP_AVG + at, exp_avg.to(EXP_AVG.dtype.element_ty), mask=mine, eviction_policy="evict_first")
        tl.store(EXP_AVG_SQ + at, exp_avg_sq.to(EXP_AVG_SQ.dtype.element_ty), mask=mine, eviction_policy="evict_first")
        if COPY is not None:
            tl.store(COPY + at, weight.to(COPY.dtype.element_ty), mask=mine)


settle_keys(globals())
