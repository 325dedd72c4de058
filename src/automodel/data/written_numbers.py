"""Numbers as text that a model learns."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_written(value: Any) -> str:
    """A number as people write it: files keep 72 as 72.0 where another row has a decimal, and 0.1 in 32 bits is
    0.10000000149011612 in 64."""
    if not isinstance(value, float) or not 1e-12 <= abs(value) < 1e16:
        return "0" if isinstance(value, float) and value == 0 else str(value)
    short = np.float32(value)
    return np.format_float_positional(short if short == value else np.float64(value), trim="-")
