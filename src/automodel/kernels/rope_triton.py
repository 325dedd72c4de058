"""The Triton half of `rope`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_positions"])
def rope_kernel(
    X, POSITIONS, TABLE, n_positions, row_stride, sign,
    TURNING: tl.constexpr, SLOTS: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a token: all its turning slots, both halves."""
    token = tl.program_id(0)
    position = tl.load(POSITIONS + token)
    slots, half = tl.arange(0, SLOTS), tl.arange(0, BLOCK)
    turns = half < HALF
    cos = tl.load(TABLE + position * HALF + half, mask=turns, other=1.0)[None, :]
    sin = tl.load(TABLE + (n_positions + position) * HALF + half, mask=turns, other=0.0)[None, :] * sign
    at = X + token.to(tl.int64) * row_stride + slots[:, None] * HEAD + half[None, :]
    inside = (slots < TURNING)[:, None] & turns[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (first * cos - second * sin).to(X.dtype.element_ty), mask=inside)
    tl.store(at + HALF, (second * cos + first * sin).to(X.dtype.element_ty), mask=inside)
