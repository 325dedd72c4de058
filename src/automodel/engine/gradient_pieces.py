"""The flat gradients of a model in pieces, and when each of them is complete.

Ranks sum gradients piece by piece. Those of the last blocks are there while the backward pass still works on the first
ones, so a piece is a few neighbouring blocks, and it is marked as soon as their gradients are written; whoever sums it
waits for the mark, not for the end of the pass. A head of its own goes with the last blocks, before which its gradient
is there. Word tables, and what is too small to be sent by itself, come at the end.

On a GPU a mark is an event that is part of the captured graph and can be waited for outside of it
(`cudaEventRecordExternal`). Which graph was replayed does not matter: all of them record the same events.

A block is done with its own gradients when the gradient of its input is there. That is asked for where the block is
entered for the first time in a pass: one that is run several times (ALBERT's) is done when its first run is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.flat_parameters import BLOCK, Place
from automodel.kernels.side_stream import SideStream
from automodel.models.block_stream import Stream

PIECE_BYTES = 64 << 20
"""Large enough for the full speed of the links, small enough for a dozen pieces of a model with a billion weights."""
SMALLEST_BYTES = 1 << 20
LARGEST_BYTES = 256 << 20
"""What is summed at the end is cut into parts of this size, which bounds the copies in another dtype."""


class NoMark:
    """On the host, where what was called before is done."""

    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass


@dataclass
class Piece:
    """Neighbouring blocks, in the order of the backward pass."""

    places: list[Place]
    ranges: list[Tensor]
    """Views of the flat buffers."""
    blocks: frozenset[int]
    """By identity; none: complete at the end."""
    mark: Any
    missing: set[int] = field(default_factory=set)
    """Blocks that are not done yet, in this pass."""


class GradientPieces:
    """Watches the blocks of a model. `placed`: gradients are still to be brought to their places; otherwise they are
    summed there. `behind`: parameters that only what follows the last block reads."""

    def __init__(
        self,
        optimizer: FlatAdamW,
        blocks: Sequence[nn.Module],
        side: SideStream | None,
        *,
        placed: bool,
        behind: Sequence[nn.Parameter] = (),
    ):
        self.optimizer, self.side, self.placed = optimizer, side, placed
        self.early, self.rest = make_pieces(optimizer, blocks, behind)
        self.entered: set[int] = set()
        self.learning = False
        self.came_early = 0
        """Pieces that were complete before the end of the last pass."""
        of_block = {identity: piece for piece in self.early for identity in piece.blocks}
        watched = [block for block in blocks if id(block) in of_block]
        self.hooks = [b.register_forward_pre_hook(self._enters(of_block[id(b)]), with_kwargs=True) for b in watched]

    @contextmanager
    def pass_of(self) -> Generator[None]:
        """Around one forward and backward pass. After it, all pieces are complete and marked."""
        self.entered, self.learning, self.came_early = set(), True, 0
        for piece in self.early:
            piece.missing = set(piece.blocks)
        try:
            yield
        finally:
            self.learning = False
        for piece in self.early:
            if piece.missing:
                self._collect(piece.places)
                piece.mark.record()
        self._collect(self.rest.places)

    def as_they_come(self, wait_for_rest: Callable[[], None], *, marked: bool = True) -> Generator[Tensor]:
        """All gradients, range by range, each waited for on the current stream. `marked`: false where there was no pass
        that could have left marks."""
        if not marked:
            wait_for_rest()
        for piece in self.early:
            if marked:
                piece.mark.wait()
            yield from piece.ranges
        wait_for_rest()
        yield from self.rest.ranges

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _enters(self, piece: Piece) -> Any:
        def enter(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if not self.learning or id(block) in self.entered:
                return
            self.entered.add(id(block))
            value = args[0] if args else kwargs.get("hidden_states")
            value = value.branch_TN if isinstance(value, Stream) else value
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _: self._done(piece, id(block)))

        return enter

    def _done(self, piece: Piece, block: int) -> None:
        if not self.learning or block not in piece.missing:
            return
        piece.missing.discard(block)
        if piece.missing:
            return
        self.came_early += 1
        with self._where_gradients_come() as side:
            elsewhere = self._collect(piece.places)
            piece.mark.record()
            if side is not None:
                side.keep(elsewhere)

    @contextmanager
    def _where_gradients_come(self) -> Generator[SideStream | None]:
        """On the stream of the weights' gradients, behind both."""
        side = self.side
        if side is None:
            yield None
            return
        side.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side.stream):
            yield side

    def _collect(self, places: Iterable[Place]) -> list[Tensor]:
        return self.optimizer.collect(places) if self.placed else []


def make_pieces(
    optimizer: FlatAdamW, blocks: Sequence[nn.Module], behind: Sequence[nn.Parameter] = ()
) -> tuple[list[Piece], Piece]:
    """Pieces in the order in which a backward pass completes them, and the rest."""
    flat = optimizer.flat
    device = flat.device.type
    owners: dict[int, list[nn.Module]] = {}
    for block in blocks:
        for parameter in block.parameters():
            owners.setdefault(id(parameter), []).append(block)
    early, free = [], {id(place.parameter): place for place in flat.places}
    group: list[nn.Module] = []
    waiting = [p for p in behind if id(p) in free and id(p) not in owners]
    for number, block in enumerate(reversed(blocks), start=1):
        group.append(block)
        own = [p for b in group for p in b.parameters() if id(p) in free and len(owners[id(p)]) == 1]
        places = [free[id(p)] for p in (*waiting, *own)]
        if number < len(blocks) and _bytes_of(places, flat) < PIECE_BYTES:
            continue
        runs = [run for run in _runs(places, flat) if _bytes_of(run, flat) >= SMALLEST_BYTES]
        members = [place for run in runs for place in run]
        for place in members:
            del free[id(place.parameter)]
        if members:
            mark = torch.cuda.Event(external=True) if device == "cuda" else NoMark()
            ranges = [_range(run, flat) for run in runs]
            early.append(Piece(members, ranges, frozenset(map(id, group)), mark))
        group, waiting = [], []
    rest = list(free.values())
    ranges = [part for run in _runs(rest, flat) for part in _parts(_range(run, flat))]
    return early, Piece(rest, ranges, frozenset(), NoMark())


def _bytes_of(places: Sequence[Place], flat: Any) -> int:
    return sum(place.blocks * BLOCK * flat.fixed[id(place.parameter)].element_size() for place in places)


def _where(place: Place, flat: Any) -> tuple[int, int]:
    view = flat.fixed[id(place.parameter)]
    return view.untyped_storage().data_ptr(), int(view.storage_offset())


def _runs(places: Sequence[Place], flat: Any) -> list[list[Place]]:
    """Neighbours in one buffer, together."""
    runs: list[list[Place]] = []
    end = None
    for place in sorted(places, key=lambda p: _where(p, flat)):
        storage, start = _where(place, flat)
        if (storage, start) == end:
            runs[-1].append(place)
        else:
            runs.append([place])
        end = storage, start + place.blocks * BLOCK
    return runs


def _range(run: Sequence[Place], flat: Any) -> Tensor:
    """All gradients of a run and what lies between them, which is zero on every rank."""
    storage, start = _where(run[0], flat)
    buffer = next(b for b in flat.fixed_buffers if b.untyped_storage().data_ptr() == storage)
    return buffer[start : start + sum(place.blocks for place in run) * BLOCK]


def _parts(long: Tensor) -> tuple[Tensor, ...]:
    return long.split(LARGEST_BYTES // long.element_size())
