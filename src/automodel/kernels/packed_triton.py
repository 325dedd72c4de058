"""Expanding weights of 4 and 8 bits (`packed.py`). Books have 16 and 256 entries and stay in the cache. Where sizes are
whole tiles (EVEN) there are no masks, and loads and stores are wide."""

import triton
import triton.language as tl

from automodel.kernels.triton_keys import settle_keys


@triton.jit(do_not_specialize=["n"])
def expand_kernel(
    CODES, SCALES, WIDE, MEAN, BOOK, DYNAMIC, OUT, n,
    DOUBLE: tl.constexpr, EVEN: tl.constexpr, HALF: tl.constexpr, STRIP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """OUT (n) from CODES (n / 2), for GROUPS groups of HALF bytes, each with its scale: the upper half of a byte comes
    first."""
    groups = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = groups[:, None] * HALF + tl.arange(0, HALF)[None, :]
    first_of = 2 * groups * HALF
    if EVEN:
        pair = tl.load(CODES + at).to(tl.int32)
        scale = tl.load(SCALES + groups)
    else:
        pair = tl.load(CODES + at, mask=2 * at < n, other=0).to(tl.int32)
        scale = tl.load(SCALES + groups, mask=first_of < n, other=0)
    if DOUBLE:
        wide = tl.load(WIDE + groups // STRIP, mask=first_of < n, other=0.0)
        scale = tl.load(DYNAMIC + scale.to(tl.int32)) * wide + tl.load(MEAN)
    first = tl.load(BOOK + (pair >> 4)) * scale[:, None]
    second = tl.load(BOOK + (pair & 15)) * scale[:, None]
    both = tl.interleave(first, second).to(OUT.dtype.element_ty)
    to = first_of[:, None] + tl.arange(0, 2 * HALF)[None, :]
    if EVEN:
        tl.store(OUT + to, both)
    else:
        tl.store(OUT + to, both, mask=to < n)


@triton.jit
def expand_rows_kernel(CODES, SCALES, OUT, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A part of one row of 8-bit codes."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(SCALES + tl.program_id(0)) / 127.0
    if WIDTH % BLOCK == 0:
        codes = tl.load(CODES + row + at).to(tl.float32)
        tl.store(OUT + row + at, (codes * scale).to(OUT.dtype.element_ty))
    else:
        codes = tl.load(CODES + row + at, mask=at < WIDTH, other=0).to(tl.float32)
        tl.store(OUT + row + at, (codes * scale).to(OUT.dtype.element_ty), mask=at < WIDTH)


settle_keys(globals())
