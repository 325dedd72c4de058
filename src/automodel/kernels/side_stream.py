"""Work beside the critical path.

Nothing in a backward pass waits for the gradient of a weight. On small batches such a GEMM, or the sum of a bias
gradient, fills a fraction of the GPU and still takes its turn in the queue; on a second stream it runs beside the chain
of activation gradients. `join` brings both together again, before the optimizer reads the gradients.

What that work reads must stay alive until it is done. Only the latest few pieces are held; before an older one is let
go, the main stream waits for it, which by then costs nothing. So memory stays bounded at any batch size.

Gradients go straight into `.grad`: autograd's own way there might add or copy on the main stream, too early. That is
right only for leaves that have no gradient yet, which `can_take` checks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

PIECES = 4  # about one encoder block

_SPARE: dict[int, list[torch.cuda.Stream]] = {}


def open_stream(priority: int = 0) -> torch.cuda.Stream:
    """One that was handed on, or a new one: cuBLAS keeps a workspace for every stream it has seen, 33 MiB on Hopper."""
    spare = _SPARE.get(priority)
    return spare.pop() if spare else torch.cuda.Stream(priority=priority)


def hand_on(stream: torch.cuda.Stream, priority: int = 0) -> None:
    """Nobody uses it any more, and nothing is recorded on it."""
    _SPARE.setdefault(priority, []).append(stream)


class SideStream:
    """A second stream, never more than `PIECES` pieces of work ahead of being waited for."""

    def __init__(self):
        self.stream = open_stream()
        self.pieces: deque[tuple[torch.cuda.Event, Any]] = deque()

    @staticmethod
    def can_take(parameters: Iterable[Tensor]) -> bool:
        return all(p.is_leaf and p.grad is None for p in parameters)

    def give(self, parameters: Sequence[Tensor], gradients: Callable[[], Sequence[Tensor]], *reads: Any) -> None:
        """Sets each parameter's `.grad` to what `gradients` computes, on this stream."""
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            for parameter, gradient in zip(parameters, gradients(), strict=True):
                parameter.grad = gradient
            self.pieces.append((self.stream.record_event(), reads))
        if len(self.pieces) > PIECES:
            done, _ = self.pieces.popleft()
            main.wait_event(done)

    def keep(self, reads: Any) -> None:
        """What this stream still reads, and was made on another."""
        self.pieces.append((self.stream.record_event(), reads))

    def join(self) -> None:
        """The current stream waits for everything given so far."""
        if self.pieces:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.pieces.clear()

    def forget(self) -> None:
        """Pieces of a recording that failed: they were never queued, their events may not be waited for outside of it,
        and what they read is of no use to anybody."""
        self.pieces.clear()


def gradients_by(
    side: SideStream | None, parameters: Sequence[Tensor], gradients: Callable[[], Sequence[Tensor]], *reads: Any
) -> list[Tensor | None]:
    """What a backward pass returns for its parameters: their gradients, or Nones where the side stream takes them.
    `reads`: what they are made of."""
    if side is not None and SideStream.can_take(parameters):
        side.give(parameters, gradients, *reads)
        return [None] * len(parameters)
    return list(gradients())
