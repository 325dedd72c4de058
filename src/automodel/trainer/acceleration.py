"""Which way a training goes, and why: a value to print and to keep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Acceleration:
    """How a `train()` call runs."""

    path: str
    """`captured` (CUDA graphs), `packed` (plain steps over flat batches) or `stock` (Trainer's own steps)."""
    reason: str

    def __str__(self) -> str:
        how = {
            "captured": "captured steps over packed batches",
            "packed": "packed steps without padding",
            "stock": "Trainer's own steps",
        }
        return f"{how[self.path]} ({self.reason})"
