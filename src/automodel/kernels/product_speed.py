"""How fast this processor makes the matrix products of a run, in each precision and by each library.

Which is the fastest cannot be read off the processor's flags: it depends on instructions (AMX, AVX512-BF16, or bf16
that is emulated), on the library that torch was built with and on the sizes of the products. So the run's own products
are made and timed, for about 50 ms. Two libraries make products of fp32 numbers: torch's own (MKL in wheels for x86)
and oneDNN; products of bf16 numbers are made by oneDNN.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProductSpeed:
    """Speeds of a run's products, 10⁹ operations a second (GFLOP/s); a product of T × I by I × O has 2 T I O."""

    fp32: float
    """By torch's own library."""
    onednn: float = 0.0
    """In fp32 by oneDNN; 0: torch has none here."""
    bf16: float = 0.0
    """0: torch cannot."""
    casts: float = 0.0
    """10⁹ numbers a second that are cast between fp32 and bf16."""
