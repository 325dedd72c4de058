"""Squares of gradients on their way to the norm: one number for each program that summed some up.

Clipping wants the norm of all gradients before the first of them is used. Whoever makes a gradient may sum up its
squares on the way (`weight_gradient.py`); the optimizer sums up those of all others when the backward pass is over.
Each takes the next piece of one buffer, in the order in which they come, and writes all of it. What a pass has taken is
what its norm reads: graphs of other shapes may have taken other pieces, and what lies behind them is of no concern.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from automodel.kernels.dispatch import processors
from automodel.kernels.flat_parameters import BLOCK

UNIT = 4
"""Numbers: pieces begin on whole 16 bytes, as Triton's kernels are made for."""
RUN = {"WALK": 8192, "STAGES": 3, "num_warps": 8}
RUNS_PER_PROCESSOR = 2


def whole_units(programs: int) -> int:
    return -(-programs // UNIT) * UNIT


def run_programs(device: torch.device) -> int:
    """Programs of `sum_run`: the most that sum up one gradient."""
    return whole_units(RUNS_PER_PROCESSOR * processors(device))


def sum_run(gradient: Tensor, piece: Tensor) -> None:
    """Squared sums of whole blocks of gradients that lie side by side."""
    from automodel.kernels.adamw_triton import square_run_kernel

    square_run_kernel[(len(piece),)](gradient, piece, gradient.numel() // BLOCK, BLOCK=BLOCK, **RUN)


class SquareSums:
    def __init__(self, size: int, device: torch.device):
        """Room for so many programs of one pass."""
        self.buffer = torch.zeros(size, dtype=torch.float32, device=device)
        self.used = 0
        self.known: set[int] = set()
        """Parameters, by identity, whose squares were summed up in this pass."""

    @property
    def taken(self) -> Tensor:
        return self.buffer[: self.used]

    def take(self, programs: int) -> Tensor:
        """A piece for so many programs, each of which has to write its number."""
        assert programs % UNIT == 0, "a number that nobody writes would be one of an earlier pass"
        piece = self.buffer[self.used : self.used + programs]
        assert len(piece) == programs, "more pieces were taken in one pass than there are gradients"
        self.used += programs
        return piece

    def take_for(self, parameters: Sequence[Tensor], programs: int) -> Tensor:
        """A piece for the gradients of these, whose squares nobody else is to sum up in this pass."""
        assert self.known.isdisjoint(map(id, parameters)), "a gradient was made twice, at its only place"
        self.known.update(map(id, parameters))
        return self.take(programs)

    def begin(self) -> None:
        """The next pass: the norm was made of what was taken, or this one was given up."""
        self.used = 0
        self.known.clear()
