"""The Triton half of `rope_heads`. A tile is (heads that turn, half a head), twice: first and second halves.

Queries and keys are one range of slots, queries first. Everything is computed in fp32 and rounded once.
"""

import triton
import triton.language as tl

from automodel.kernels.triton_keys import settle_keys


@triton.jit
def head_weights(QUERY, KEY, slots, half, HALF: tl.constexpr, QUERIES: tl.constexpr, OFFSET: tl.constexpr):
    """(SLOTS, BLOCK) weights of one half: the queries' norm for query slots, the keys' for the others."""
    turns = half < HALF
    query = tl.load(QUERY + half, mask=turns, other=0.0).to(tl.float32)
    key = tl.load(KEY + half, mask=turns, other=0.0).to(tl.float32)
    return tl.where((slots < QUERIES)[:, None], query[None, :], key[None, :]) + OFFSET


@triton.jit(do_not_specialize=["n_positions"])
def heads_forward_kernel(
    X, POSITIONS, TABLE, QUERY_WEIGHT, KEY_WEIGHT, OUT, n_positions, x_stride, eps,
    OFFSET: tl.constexpr, WITH_VALUES: tl.constexpr, VALUE_SLOTS: tl.constexpr, WHOLE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """One program a token: norm and rotation of its queries and keys into OUT (T, (QUERIES + KEYS) · HEAD), or with the
    values behind them (T, (QUERIES + 2 KEYS) · HEAD)."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(POSITIONS + token)
    slots, half = tl.arange(0, SLOTS), tl.arange(0, BLOCK)
    inside = (slots < QUERIES + KEYS)[:, None] & (half < HALF)[None, :]
    at = slots[:, None] * HEAD + half[None, :]
    first = tl.load(X + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(X + token * x_stride + at + HALF, mask=inside, other=0.0).to(tl.float32)

    rstd = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD + eps)[:, None]
    first = first * rstd * head_weights(QUERY_WEIGHT, KEY_WEIGHT, slots, half, HALF, QUERIES, OFFSET)
    second = second * rstd * head_weights(QUERY_WEIGHT + HALF, KEY_WEIGHT + HALF, slots, half, HALF, QUERIES, OFFSET)

    cos = tl.load(TABLE + position * HALF + half, mask=half < HALF, other=1.0)[None, :]
    sin = tl.load(TABLE + (n_positions + position) * HALF + half, mask=half < HALF, other=0.0)[None, :]
    out = OUT + token * (QUERIES + (2 if WITH_VALUES else 1) * KEYS) * HEAD
    tl.store(out + at, (first * cos - second * sin).to(OUT.dtype.element_ty), mask=inside)
    tl.store(out + at + HALF, (second * cos + first * sin).to(OUT.dtype.element_ty), mask=inside)
    if WITH_VALUES and KEYS > 0:
        values = (QUERIES + KEYS) * HEAD
        copy_heads(X + token * x_stride + values, out + values, KEYS, HEAD, VALUE_SLOTS, WHOLE)


@triton.jit
def copy_heads(FROM, TO, HEADS: tl.constexpr, HEAD: tl.constexpr, SLOTS: tl.constexpr, WHOLE: tl.constexpr):
    """One token's heads, which lie side by side."""
    heads, whole = tl.arange(0, SLOTS), tl.arange(0, WHOLE)
    real = (heads < HEADS)[:, None] & (whole < HEAD)[None, :]
    at = heads[:, None] * HEAD + whole[None, :]
    tl.store(TO + at, tl.load(FROM + at, mask=real, other=0.0).to(TO.dtype.element_ty), mask=real)


@triton.jit
def load_slots(DQ, DK, token, dq_stride, dk_stride, at, slots, inside, QUERIES: tl.constexpr, KEYS: tl.constexpr,
               HEAD: tl.constexpr):  # fmt: skip
    """Gradients of queries and keys, which lie in two tensors, as one tile."""
    tile = tl.zeros(inside.shape, tl.float32)
    if QUERIES > 0:
        tile += tl.load(DQ + token * dq_stride + at, mask=inside & (slots < QUERIES)[:, None], other=0.0).to(tl.float32)
    if KEYS > 0:
        shifted = at - QUERIES * HEAD
        keys = inside & (slots >= QUERIES)[:, None]
        tile += tl.load(DK + token * dk_stride + shifted, mask=keys, other=0.0).to(tl.float32)
    return tile


@triton.jit(do_not_specialize=["n_tokens", "n_positions"])
def heads_backward_kernel(
    DQ, DK, DV, X, POSITIONS, TABLE, QUERY_WEIGHT, KEY_WEIGHT, DX, PARTIAL, n_tokens, n_positions,
    dq_stride, dk_stride, dv_stride, x_stride, eps,
    VALUE_SLOTS: tl.constexpr, WHOLE: tl.constexpr, OFFSET: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """DX (T, (QUERIES + 2 KEYS) · HEAD) of one token after the other. DQ and DK may lie in DX itself, at their places:
    a thread reads what it writes, before it does. DV is None where the values' gradient is there already, X where there
    were no norms. PARTIAL is (programs, 2, HEAD): gradients of both weights. Each slot has sums of its own, in
    registers; slots meet at the end, since a sum over slots moves numbers between warps."""
    slots, half = tl.arange(0, SLOTS), tl.arange(0, BLOCK)
    turns = half < HALF
    inside = (slots < QUERIES + KEYS)[:, None] & turns[None, :]
    queries = (slots < QUERIES)[:, None]
    at = slots[:, None] * HEAD + half[None, :]
    first_sums = tl.zeros((SLOTS, BLOCK), tl.float32)
    second_sums = tl.zeros((SLOTS, BLOCK), tl.float32)
    for index in range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        token = tl.cast(index, tl.int64)
        position = tl.load(POSITIONS + token)
        cos = tl.load(TABLE + position * HALF + half, mask=turns, other=1.0)[None, :]
        sin = tl.load(TABLE + (n_positions + position) * HALF + half, mask=turns, other=0.0)[None, :]
        one = load_slots(DQ, DK, token, dq_stride, dk_stride, at, slots, inside, QUERIES, KEYS, HEAD)
        two = load_slots(DQ, DK, token, dq_stride, dk_stride, at + HALF, slots, inside, QUERIES, KEYS, HEAD)
        first = one * cos + two * sin
        second = two * cos - one * sin
        if X is not None:
            x_first = tl.load(X + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
            x_second = tl.load(X + token * x_stride + at + HALF, mask=inside, other=0.0).to(tl.float32)
            squares = tl.sum(x_first * x_first, axis=1) + tl.sum(x_second * x_second, axis=1)
            rstd = tl.rsqrt(squares / HEAD + eps)[:, None]
            x_first, x_second = x_first * rstd, x_second * rstd
            first_sums += first * x_first
            second_sums += second * x_second
            first *= head_weights(QUERY_WEIGHT, KEY_WEIGHT, slots, half, HALF, QUERIES, OFFSET)
            second *= head_weights(QUERY_WEIGHT + HALF, KEY_WEIGHT + HALF, slots, half, HALF, QUERIES, OFFSET)
            along = (tl.sum(first * x_first, axis=1) + tl.sum(second * x_second, axis=1))[:, None] / HEAD
            first = (first - x_first * along) * rstd
            second = (second - x_second * along) * rstd
        out = DX + token * (QUERIES + 2 * KEYS) * HEAD
        tl.store(out + at, first.to(DX.dtype.element_ty), mask=inside)
        tl.store(out + at + HALF, second.to(DX.dtype.element_ty), mask=inside)
        if 2 * HALF < HEAD:
            # What a partial rotation leaves alone.
            rest = tl.arange(0, WHOLE)
            kept = (slots < QUERIES + KEYS)[:, None] & ((rest >= 2 * HALF) & (rest < HEAD))[None, :]
            still = slots[:, None] * HEAD + rest[None, :]
            same = load_slots(DQ, DK, token, dq_stride, dk_stride, still, slots, kept, QUERIES, KEYS, HEAD)
            tl.store(out + still, same.to(DX.dtype.element_ty), mask=kept)
        if DV is not None:
            copy_heads(DV + token * dv_stride, out + (QUERIES + KEYS) * HEAD, KEYS, HEAD, VALUE_SLOTS, WHOLE)
    if PARTIAL is not None:
        sums = PARTIAL + tl.program_id(0) * 2 * HEAD + half
        tl.store(sums, tl.sum(tl.where(queries, first_sums, 0.0), axis=0), mask=turns)
        tl.store(sums + HALF, tl.sum(tl.where(queries, second_sums, 0.0), axis=0), mask=turns)
        tl.store(sums + HEAD, tl.sum(tl.where(queries, 0.0, first_sums), axis=0), mask=turns)
        tl.store(sums + HEAD + HALF, tl.sum(tl.where(queries, 0.0, second_sums), axis=0), mask=turns)


settle_keys(globals())
