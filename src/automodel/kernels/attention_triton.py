"""The Triton half of `attention`.

Scores are kept in units of log 2, so that the exponential is the hardware's exp2. A program sees one tile of one
document and of MEMBERS query heads that share a key head. Their queries stand below each other: the rows of a tile are
BLOCK_M queries of the first head, the same queries of the second, and so on. Forward, the many programs past the end of
a short document leave at once; backward there are none, since tiles come from a list.
"""

import triton
import triton.language as tl

from automodel.kernels import attention
from automodel.kernels.attention_tiles_triton import list_tiles, tile_at
from automodel.kernels.philox import ROUNDS, THRESHOLD_BITS
from automodel.kernels.triton_keys import settle_keys

PHILOX_ROUNDS = tl.constexpr(ROUNDS)
THRESHOLD_SHIFT = tl.constexpr(32 - THRESHOLD_BITS)
LOG2_E = tl.constexpr(attention.LOG2_E)
KEY_STEP = tl.constexpr(attention.KEY_STEP - (1 << 32))  # the same bits as a signed number
MIX_A = tl.constexpr(attention.MIX_A)
MIX_B = tl.constexpr(attention.MIX_B)


@triton.jit
def tile_of_queries(first, head, BLOCK_M: tl.constexpr, MEMBERS: tl.constexpr):
    """(query, head) of every row of a tile."""
    row = tl.arange(0, MEMBERS * BLOCK_M)
    return first + row % BLOCK_M, head + row // BLOCK_M


@triton.jit
def row_words(SEED, site, heads, rows):
    """A random word for every query of a head."""
    zero = rows * 0
    word, _, _, _ = tl.philox(tl.load(SEED), rows, heads, zero + site, zero, PHILOX_ROUNDS)
    return word.to(tl.uint32, bitcast=True)


@triton.jit
def kept(x, threshold):
    """From query word + key · KEY_STEP to one bit."""
    x = (x ^ (x >> 16)) * tl.full((), MIX_A, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), MIX_B, tl.uint32)
    return x >= (threshold.to(tl.uint32) << THRESHOLD_SHIFT)


@triton.jit
def key_words(keys):
    return (keys.to(tl.int32) * KEY_STEP).to(tl.uint32, bitcast=True)


@triton.jit
def sees(row, key, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether a query sees a key of its document, for indices of any shape that broadcast."""
    seen = key < length
    if CAUSAL:
        seen = seen & (key <= row)
    if WINDOW >= 0:
        seen = seen & (row - key <= WINDOW) & (key - row <= WINDOW)
    return seen


@triton.jit
def saturation(x, CAP: tl.constexpr):
    """tanh(x / CAP) as 1 - 2 / (exp(2u) + 1), which neither overflows nor needs a library."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 / CAP * LOG2_E)) + 1.0)


@triton.jit
def keys_of(first, length, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The range of keys that the queries first … first + BLOCK_M see, from a tile's border."""
    low = 0
    high = length
    if WINDOW >= 0:
        low = tl.maximum(first - WINDOW, 0) // BLOCK_N * BLOCK_N
        high = tl.minimum(length, first + BLOCK_M + WINDOW)
    if CAUSAL:
        high = tl.minimum(high, first + BLOCK_M)
    return low, high


@triton.jit
def queries_of(first, length, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The range of queries that see the keys first … first + BLOCK_N."""
    low = 0
    high = length
    if WINDOW >= 0:
        low = tl.maximum(first - WINDOW, 0) // BLOCK_M * BLOCK_M
        high = tl.minimum(length, first + BLOCK_N + WINDOW)
    if CAUSAL:
        low = tl.maximum(low, first // BLOCK_M * BLOCK_M)
    return low, high


@triton.jit(do_not_specialize=["n_tokens", "site", "threshold"])
def attention_forward_kernel(
    QKV, OUT, LSE, WORDS, CU, SEED, n_tokens, scale, site, threshold, kept_scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1) * MEMBERS
    document = tl.program_id(2)
    begin = tl.load(CU + document)
    length = tl.load(CU + document + 1) - begin
    if first < length:
        WIDTH: tl.constexpr = (H + 2 * K) * D
        rows, heads = tile_of_queries(first, head, BLOCK_M, MEMBERS)
        dims = tl.arange(0, BLOCK_D)
        stream = QKV + begin.to(tl.int64) * WIDTH
        key_head = head // (H // K)
        real = rows < length
        inside = real[:, None] & (dims < D)[None, :]
        q = tl.load(stream + (rows * WIDTH + heads * D)[:, None] + dims[None, :], mask=inside, other=0.0)
        highest = tl.full((MEMBERS * BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((MEMBERS * BLOCK_M,), tl.float32)
        out = tl.zeros((MEMBERS * BLOCK_M, BLOCK_D), tl.float32)
        if SEED is not None:
            words = row_words(SEED, site, heads, begin + rows)
            kept_words = WORDS + heads.to(tl.int64) * n_tokens + begin + rows
            tl.store(kept_words, words.to(tl.int32, bitcast=True), mask=real)  # the backward pass reads them
        low, high = keys_of(first, length, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
        for n in range(low, high, BLOCK_N):
            keys = n + tl.arange(0, BLOCK_N)
            at = keys[:, None] * WIDTH + (H + key_head) * D + dims[None, :]
            k = tl.load(stream + at, mask=(keys < length)[:, None] & (dims < D)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
            if CAP > 0.0:
                scores = (CAP * LOG2_E) * saturation(scores * (1.0 / LOG2_E), CAP)
            scores = tl.where(sees(rows[:, None], keys[None, :], length, CAUSAL, WINDOW), scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            # A row whose window lies wholly in later tiles has seen nothing yet: 0 instead of -inf - -inf.
            level = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(scores - level[:, None])
            shrink = tl.exp2(highest - level)
            total = total * shrink + tl.sum(p, 1)
            if SEED is not None:
                p = tl.where(kept(words[:, None] + key_words(begin + keys)[None, :], threshold), p, 0.0)
            v = tl.load(stream + at + K * D, mask=(keys < length)[:, None] & (dims < D)[None, :], other=0.0)
            out = tl.dot(p.to(v.dtype), v, out * shrink[:, None])
            highest = higher
        total = tl.where(real, total, 1.0)
        if SEED is not None:
            out *= kept_scale
        out = out / total[:, None]
        place = begin + rows
        at = (place.to(tl.int64) * (H * D) + heads * D)[:, None] + dims[None, :]
        tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=inside)
        tl.store(LSE + heads.to(tl.int64) * n_tokens + place, highest + tl.log2(total), mask=real)


@triton.jit
def row_sums(
    OUT, DOUT, DELTA, first, head, n_tokens,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Σ dout · out of ROWS queries of a head."""
    rows = first + tl.arange(0, ROWS)
    real = rows < n_tokens
    dims = tl.arange(0, BLOCK_D)
    at = rows.to(tl.int64)[:, None] * (H * D) + head * D + dims[None, :]
    out = tl.load(OUT + at, mask=real[:, None] & (dims < D)[None, :], other=0.0).to(tl.float32)
    dout = tl.load(DOUT + at, mask=real[:, None] & (dims < D)[None, :], other=0.0).to(tl.float32)
    tl.store(DELTA + head.to(tl.int64) * n_tokens + rows, tl.sum(out * dout, 1), mask=real)


@triton.jit(do_not_specialize=["n_tokens", "n_documents", "n_key_tiles", "n_query_tiles"])
def attention_delta_kernel(
    OUT, DOUT, DELTA, CU, TILES, n_tokens, n_documents, n_key_tiles, n_query_tiles,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What the backward pass needs before it begins: Σ dout · out of every query and head, and, by the first programs,
    the list of its tiles, those of keys and then those of queries."""
    program = tl.program_id(0)
    listing = n_documents + 1
    if program < listing:
        list_tiles(CU, TILES, program, n_documents, n_key_tiles, BLOCK_N, CAUSAL, True)
    elif program < 2 * listing:
        queries = TILES + 3 * n_key_tiles
        list_tiles(CU, queries, program - listing, n_documents, n_query_tiles, BLOCK_M, CAUSAL, False)
    else:
        program -= 2 * listing
        row_sums(OUT, DOUT, DELTA, program // H * ROWS, program % H, n_tokens, H, D, BLOCK_D, ROWS)


@triton.jit
def load_query_side(
    QKV, DOUT, LSE, DELTA, WORDS, begin, rows, real, heads, n_tokens,
    WIDTH: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """q, dout, log-sum-exp, delta and random words of a tile of queries. Rows that do not exist get weight zero."""
    dims = tl.arange(0, BLOCK_D)
    place = (begin + rows).to(tl.int64)
    inside = real[:, None] & (dims < D)[None, :]
    q = tl.load(QKV + (place * WIDTH + heads * D)[:, None] + dims[None, :], mask=inside, other=0.0)
    dout = tl.load(DOUT + (place * (H * D) + heads * D)[:, None] + dims[None, :], mask=inside, other=0.0)
    row = heads.to(tl.int64) * n_tokens + place
    lse = tl.load(LSE + row, mask=real, other=float("inf"))
    delta = tl.load(DELTA + row, mask=real, other=0.0)
    words = rows.to(tl.uint32)
    if WORDS is not None:
        words = tl.load(WORDS + row, mask=real, other=0).to(tl.uint32, bitcast=True)
    return q, dout, lse, delta, words


@triton.jit
def store_turned_back(
    TO, g, place, columns, exists, POSITIONS, TABLE, n_positions,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of rotated vectors, (ROWS, D), as that of the vectors before. place: rows of the stream;
    columns: where their heads begin in it. Both halves of a vector meet in one thread, once a tile."""
    HALF: tl.constexpr = D // 2
    first, second = tl.split(tl.permute(tl.reshape(g, (ROWS, 2, HALF)), (0, 2, 1)))
    half = tl.arange(0, HALF)
    position = tl.load(POSITIONS + place, mask=exists, other=0)
    inside = exists[:, None] & (half < HALF)[None, :]
    cos = tl.load(TABLE + position[:, None] * HALF + half[None, :], mask=inside, other=1.0)
    sin = tl.load(TABLE + (n_positions + position)[:, None] * HALF + half[None, :], mask=inside, other=0.0)
    at = TO + (place * WIDTH + columns)[:, None] + half[None, :]
    tl.store(at, (first * cos + second * sin).to(TO.dtype.element_ty), mask=inside)
    tl.store(at + HALF, (second * cos - first * sin).to(TO.dtype.element_ty), mask=inside)


@triton.jit
def gradients_of_keys(
    QKV, DOUT, LSE, DELTA, WORDS, DQKV, POSITIONS, TABLE, n_positions,
    begin, length, first, head, n_tokens, scale, threshold, kept_scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys of one key head, from all queries that see them."""
    WIDTH: tl.constexpr = (H + 2 * K) * D
    MASKED: tl.constexpr = CAUSAL or WINDOW >= 0
    dims = tl.arange(0, BLOCK_D)
    stream = QKV + begin.to(tl.int64) * WIDTH
    gradient = DQKV + begin.to(tl.int64) * WIDTH
    keys = first + tl.arange(0, BLOCK_N)
    inside = (keys < length)[:, None] & (dims < D)[None, :]
    at = keys[:, None] * WIDTH + (H + head) * D + dims[None, :]
    k = tl.load(stream + at, mask=inside, other=0.0)
    v = tl.load(stream + at + K * D, mask=inside, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    low, high = queries_of(first, length, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    for member in range(0, H // K, MEMBERS):
        for m in range(low, high, BLOCK_M):
            rows, heads = tile_of_queries(m, head * (H // K) + member, BLOCK_M, MEMBERS)
            real = rows < length
            q, dout, lse, delta, words = load_query_side(
                QKV, DOUT, LSE, DELTA, WORDS, begin, rows, real, heads, n_tokens, WIDTH, H, D, BLOCK_D
            )
            # Everything with the keys down and the queries across.
            scores = tl.dot(k, tl.trans(q)) * (scale * LOG2_E)
            if CAP > 0.0:
                bent = saturation(scores * (1.0 / LOG2_E), CAP)
                scores = (CAP * LOG2_E) * bent
            p = tl.exp2(scores - lse[None, :])
            if MASKED:
                p = tl.where(sees(rows[None, :], keys[:, None], length, CAUSAL, WINDOW), p, 0.0)
            dp = tl.dot(v, tl.trans(dout))
            if WORDS is not None:
                keep = kept(key_words(begin + keys)[:, None] + words[None, :], threshold)
                dv = tl.dot(tl.where(keep, p * kept_scale, 0.0).to(dout.dtype), dout, dv)
                dp = tl.where(keep, dp * kept_scale, 0.0)
            else:
                dv = tl.dot(p.to(dout.dtype), dout, dv)
            ds = p * (dp - delta[None, :])
            if CAP > 0.0:
                ds = ds * (1.0 - bent * bent)
            dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(gradient + at + K * D, dv.to(DQKV.dtype.element_ty), mask=inside)
    if TABLE is not None:
        place = (begin + keys).to(tl.int64)
        store_turned_back(
            DQKV, dk * scale, place, (H + head) * D, keys < length, POSITIONS, TABLE, n_positions, BLOCK_N, WIDTH, D
        )
    else:
        tl.store(gradient + at, (dk * scale).to(DQKV.dtype.element_ty), mask=inside)


@triton.jit
def gradient_of_queries(
    QKV, DOUT, LSE, DELTA, WORDS, DQKV, POSITIONS, TABLE, n_positions,
    begin, length, first, head, n_tokens, scale, threshold, kept_scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries, from all keys they see."""
    WIDTH: tl.constexpr = (H + 2 * K) * D
    MASKED: tl.constexpr = CAUSAL or WINDOW >= 0
    dims = tl.arange(0, BLOCK_D)
    stream = QKV + begin.to(tl.int64) * WIDTH
    gradient = DQKV + begin.to(tl.int64) * WIDTH
    rows, heads = tile_of_queries(first, head, BLOCK_M, MEMBERS)
    real = rows < length
    key_head = head // (H // K)
    q, dout, lse, delta, words = load_query_side(
        QKV, DOUT, LSE, DELTA, WORDS, begin, rows, real, heads, n_tokens, WIDTH, H, D, BLOCK_D
    )
    dq = tl.zeros((MEMBERS * BLOCK_M, BLOCK_D), tl.float32)
    low, high = keys_of(first, length, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    for n in range(low, high, BLOCK_N):
        keys = n + tl.arange(0, BLOCK_N)
        inside = (keys < length)[:, None] & (dims < D)[None, :]
        at = keys[:, None] * WIDTH + (H + key_head) * D + dims[None, :]
        k = tl.load(stream + at, mask=inside, other=0.0)
        v = tl.load(stream + at + K * D, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
        if CAP > 0.0:
            bent = saturation(scores * (1.0 / LOG2_E), CAP)
            scores = (CAP * LOG2_E) * bent
        p = tl.exp2(scores - lse[:, None])
        if MASKED:
            p = tl.where(sees(rows[:, None], keys[None, :], length, CAUSAL, WINDOW), p, 0.0)
        dp = tl.dot(dout, tl.trans(v))
        if WORDS is not None:
            keep = kept(words[:, None] + key_words(begin + keys)[None, :], threshold)
            dp = tl.where(keep, dp * kept_scale, 0.0)
        ds = p * (dp - delta[:, None])
        if not MASKED:  # past the end k is zero, but p is exp2(-lse): infinite where all scores are low
            ds = tl.where((keys < length)[None, :], ds, 0.0)
        if CAP > 0.0:
            ds = ds * (1.0 - bent * bent)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    if TABLE is not None:
        place = (begin + rows).to(tl.int64)
        store_turned_back(
            DQKV, dq * scale, place, heads * D, real, POSITIONS, TABLE, n_positions, MEMBERS * BLOCK_M, WIDTH, D
        )
    else:
        at = (rows * WIDTH + heads * D)[:, None] + dims[None, :]
        tl.store(gradient + at, (dq * scale).to(DQKV.dtype.element_ty), mask=real[:, None] & (dims < D)[None, :])


@triton.jit(do_not_specialize=["n_tokens", "n_positions", "n_key_tiles", "n_query_tiles", "threshold"])
def attention_backward_kernel(
    QKV, DOUT, LSE, DELTA, WORDS, DQKV, TILES, POSITIONS, TABLE,
    n_tokens, n_positions, n_key_tiles, n_query_tiles, scale, threshold, kept_scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """The first programs take tiles of keys, which have the most to do, the others tiles of queries. Where nothing
    but the document's end limits what a query sees, weights need no mask: keys past the end were loaded as zeros and
    their own gradients are not stored; queries past the end have weight zero. With TABLE, queries and keys were rotated
    by their positions, and their gradients are those of before."""
    program = tl.program_id(0)
    if program < n_key_tiles * K:
        begin, length, first = tile_at(TILES, program // K, n_key_tiles)
        if length > 0:
            gradients_of_keys(
                QKV, DOUT, LSE, DELTA, WORDS, DQKV, POSITIONS, TABLE, n_positions,
                begin, length, first, program % K, n_tokens, scale, threshold, kept_scale,
                H, K, D, BLOCK_D, CAUSAL, WINDOW, CAP, BLOCK_M, BLOCK_N, MEMBERS,
            )  # fmt: skip
    else:
        GROUPS: tl.constexpr = H // MEMBERS
        program -= n_key_tiles * K
        begin, length, first = tile_at(TILES + 3 * n_key_tiles, program // GROUPS, n_query_tiles)
        if length > 0:
            gradient_of_queries(
                QKV, DOUT, LSE, DELTA, WORDS, DQKV, POSITIONS, TABLE, n_positions,
                begin, length, first, program % GROUPS * MEMBERS, n_tokens, scale, threshold, kept_scale,
                H, K, D, BLOCK_D, CAUSAL, WINDOW, CAP, BLOCK_M, BLOCK_N, MEMBERS,
            )  # fmt: skip


settle_keys(globals())
