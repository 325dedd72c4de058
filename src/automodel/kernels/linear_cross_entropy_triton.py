"""The Triton half of `linear_cross_entropy`: one program a row of logits, two walks over it.

The first walk finds the log-sum-exp. Every thread keeps the maximum and the sum of its own columns, VEC of them at a
time, so nothing moves between threads until the end, and a column costs one exponential (and 1/VEC of another, when
the thread's maximum rises). The second walk writes the gradient over the logits, from the end of the row to its
beginning: what the first walk read last is still in the L2 cache. A row of 128,256 words in bf16 is 250 kB, and 132
programs at once are 34 MB of an H200's 50: hence few, large programs.

Everything is fp32, in powers of two (`exp2` is what the hardware has). Columns past V are alignment, never read as
numbers.
"""

import triton
import triton.language as tl

from automodel.kernels.triton_keys import settle_keys

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # not -inf: a thread without columns would subtract it from itself


@triton.jit
def seen(x, LOGIT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """The logit as the softmax sees it: scaled, then capped by tanh, which is 1 - 2 / (exp(2u) + 1)."""
    z = x * LOGIT_SCALE
    if SOFTCAP > 0.0:
        z = SOFTCAP * (1.0 - 2.0 / (tl.exp2(z * (2.0 / SOFTCAP * LOG2_E)) + 1.0))
    return z


@triton.jit(do_not_specialize=["first"])
def cross_entropy_rows_kernel(
    LOGITS, LABELS, SCALE, LOSS, RIGHT, ENTROPY, first,
    V: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, IGNORE: tl.constexpr,
    LOGIT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, Z_LOSS: tl.constexpr, SMOOTHING: tl.constexpr,
    LEARNS: tl.constexpr,
):  # fmt: skip
    """LOGITS (chunk, STRIDE) become their gradients where LEARNS; LABELS, LOSS, RIGHT and ENTROPY are those of all
    rows, of which this chunk begins at `first`. RIGHT and ENTROPY may be None."""
    row = tl.program_id(0)
    base = LOGITS + row.to(tl.int64) * STRIDE
    lanes = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    label = tl.load(LABELS + first + row)
    if label == IGNORE:
        tl.store(LOSS + first + row, 0.0)
        if RIGHT is not None:
            tl.store(RIGHT + first + row, 0)
        if ENTROPY is not None:
            tl.store(ENTROPY + first + row, 0.0)
        if LEARNS:
            for start in range(0, V, LANES * VEC):
                cols = start + lanes
                nothing = tl.zeros((LANES, VEC), LOGITS.dtype.element_ty)
                tl.store(base + cols, nothing, mask=cols < STRIDE)
    else:
        # A label outside of the vocabulary makes the loss NaN, which stops the run; it never reads elsewhere.
        known = (label >= 0) & (label < V)
        own = tl.load(base + label, mask=known, other=float("nan")).to(tl.float32)
        highest = tl.full((LANES,), LOWEST, tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        plain_sum = tl.zeros((LANES,), tl.float32)
        beaten = tl.zeros((LANES,), tl.int32)
        below = tl.zeros((LANES,), tl.float32)  # Σ exp2(power - highest) · (power - highest)
        for start in range(0, V, LANES * VEC):
            cols = start + lanes
            x = tl.load(base + cols, mask=cols < STRIDE, other=0.0).to(tl.float32)
            z = tl.where(cols < V, seen(x, LOGIT_SCALE, SOFTCAP), float("-inf"))
            power = z * LOG2_E
            most = tl.maximum(highest, tl.max(power, axis=1))
            fall = highest - most
            if ENTROPY is not None:
                under = tl.where(cols < V, power - most[:, None], 0.0)
                # A logit of -inf has probability 0, and 0 · -inf is no number.
                parts = tl.exp2(under) * tl.maximum(under, -10000.0)
                below = tl.exp2(fall) * (below + fall * total) + tl.sum(tl.where(cols < V, parts, 0.0), axis=1)
            total = total * tl.exp2(fall) + tl.sum(tl.exp2(power - most[:, None]), axis=1)
            highest = most
            if SMOOTHING > 0.0:
                plain_sum += tl.sum(tl.where(cols < V, z, 0.0), axis=1)
            if RIGHT is not None:
                # The first of equal logits counts, as in torch.argmax: in bf16 the best two are often equal. Neither
                # scale nor cap changes the order.
                beats = (cols < V) & ((x > own) | ((x == own) & (cols < label)))
                beaten = tl.maximum(beaten, tl.max(beats.to(tl.int32), axis=1))
        most = tl.max(highest, axis=0)
        summed = tl.sum(total * tl.exp2(highest - most), axis=0)
        lse_power = most + tl.log2(summed)
        lse = lse_power * LN_2
        loss = lse - seen(own, LOGIT_SCALE, SOFTCAP)
        if SMOOTHING > 0.0:
            loss = (1.0 - SMOOTHING) * loss + SMOOTHING * (lse - tl.sum(plain_sum, axis=0) / V)
        if Z_LOSS > 0.0:
            loss += Z_LOSS * lse * lse
        tl.store(LOSS + first + row, loss)
        if RIGHT is not None:
            tl.store(RIGHT + first + row, 1 - tl.max(beaten, axis=0))
        if ENTROPY is not None:
            fall = tl.where(total > 0.0, highest - most, 0.0)  # a thread without columns has nothing to add
            expected = tl.sum(tl.exp2(fall) * (below + fall * total), axis=0) / summed
            tl.store(ENTROPY + first + row, (tl.log2(summed) - expected) * LN_2)
        if LEARNS:
            unit = tl.load(SCALE) * LOGIT_SCALE
            gain = unit * (1.0 + 2.0 * Z_LOSS * lse)
            blocks = tl.cdiv(V, LANES * VEC)
            for index in range(blocks):
                cols = (blocks - 1 - index) * (LANES * VEC) + lanes
                x = tl.load(base + cols, mask=cols < STRIDE, other=0.0).to(tl.float32)
                z = seen(x, LOGIT_SCALE, SOFTCAP)
                d = tl.exp2(z * LOG2_E - lse_power) * gain
                d -= tl.where(cols == label, unit * (1.0 - SMOOTHING), 0.0)
                if SMOOTHING > 0.0:
                    d -= unit * (SMOOTHING / V)
                if SOFTCAP > 0.0:
                    d *= 1.0 - (z / SOFTCAP) * (z / SOFTCAP)
                tl.store(base + cols, d.to(LOGITS.dtype.element_ty), mask=cols < STRIDE)


settle_keys(globals())
