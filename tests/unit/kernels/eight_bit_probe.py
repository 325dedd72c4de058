"""A kernel that only codes and decodes, around the two functions of `adamw8_triton`; for `test_adamw8.py`."""

import torch
import triton
import triton.language as tl

from automodel.kernels.adamw8 import SIGNED_ZERO
from automodel.kernels.adamw8_triton import distance_of, magnitude_of

ZERO = tl.constexpr(SIGNED_ZERO)


@triton.jit
def code_kernel(SHARES, CODES, VALUES, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    share = tl.load(SHARES + at)
    j = distance_of(tl.abs(share), SIGNED)
    code = j
    if SIGNED:
        code = ZERO + tl.where(share < 0, -tl.minimum(j, ZERO), j)
    else:
        code = tl.where((share > 0) & (j == 0), 1, j)
    tl.store(CODES + at, code.to(tl.uint8))
    if SIGNED:
        value = magnitude_of(tl.abs(code - ZERO), SIGNED)
        value = tl.where(code < ZERO, -value, value)
    else:
        value = magnitude_of(code, SIGNED)
    tl.store(VALUES + at, value)


def probe(shares: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, what the book has for them) of numbers up to 1, by the kernel's arithmetic."""
    codes, values = torch.zeros(shares.shape, dtype=torch.uint8), torch.zeros_like(shares)
    code_kernel[(len(shares),)](shares, codes, values, SIGNED=signed, BLOCK=shares.shape[1])
    return codes, values
