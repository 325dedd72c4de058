"""All parameters of a model as views of a few long buffers.

An optimizer step over a hundred small tensors is a hundred launches, or one launch with tables of addresses. Here the
weights, both moments and the 16-bit copies each live in one buffer, at the same places, so one elementwise kernel walks
over everything. Each parameter starts on a block boundary and is padded with zeros to whole blocks: a block never
straddles two parameters, and every view is aligned for wide loads.

Which buffer the model computes with depends on the precision:

    copy_dtype set (bf16)     `weight` is fp32 and belongs to the optimizer; the model's parameters are views of `copy`,
                              and so are its gradients' dtypes. A group with `"full_precision": True` keeps fp32.
    copy_dtype None           the parameters are views of `weight` itself, in their own dtype (fp32, or pure bf16)

Gradients normally stay where autograd puts them. Two others want them at fixed places, side by side in long buffers
(`fixed`): `attach_gradients` for sums over micro-batches, which several captured graphs add to; and `placed`, for
gradients that are written once a step, in the parameters' own dtype, and then summed over ranks buffer by buffer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

BLOCK = 2048
"""Elements of one block. DistilBERT's 67.0 M in 104 tensors need 0.1 % padding."""


LONG_BLOCKS = 2048
"""4 M elements: 8 MB in bf16, 2 µs at the memory's speed, about what a launch in a graph costs. Not tuned."""


class Place(NamedTuple):
    """Where a parameter stands in the buffers."""

    parameter: torch.nn.Parameter
    group: int
    start: int
    blocks: int
    full_precision: bool
    lazy: bool
    """Updated row by row (`lazy_rows.py`), not by the walk over all blocks."""
    late: bool
    """Updated at the start of the next step (`late_update.py`)."""

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


class Run(NamedTuple):
    """Neighbours of one group whose gradients are neighbours, too: one long piece, which a kernel can walk over without
    looking up where each block belongs."""

    start: int
    blocks: int
    group: int
    gradient: torch.Tensor
    """(blocks · BLOCK,), padding included."""

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.start : self.start + self.blocks * BLOCK]


@dataclass(frozen=True)
class LatePart:
    """Parameters that are updated together, when the next step is about to read them."""

    places: list[Place]
    gradients: list[torch.Tensor]
    """At fixed places, where they stay until then."""
    runs: list[Run]
    """The same parameters, as few long pieces."""


def _places(groups: Sequence[dict], mixed: bool, lazy: torch.nn.Parameter | None, late: set[int]) -> Iterator[Place]:
    """In the order of the groups; in memory, a lazy parameter stands after all others."""
    start, seen = 0, set()
    sizes = [-(-p.numel() // BLOCK) for group in groups for p in group["params"] if p is not lazy]
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) in seen:
                raise ValueError("a parameter stands in two groups, or twice in one; pass each parameter once")
            seen.add(id(parameter))
            blocks = -(-parameter.numel() // BLOCK)
            waits = parameter is lazy
            full_precision = not mixed or bool(group.get("full_precision"))
            begin = sum(sizes) * BLOCK if waits else start
            yield Place(parameter, index, begin, blocks, full_precision, waits, id(parameter) in late)
            start += 0 if waits else blocks * BLOCK


def _is_long(place: Place) -> bool:
    """Whole blocks only: nothing lies behind a gradient that autograd made."""
    return place.blocks >= LONG_BLOCKS and place.parameter.numel() == place.blocks * BLOCK


def _go_on(run: Run, place: Place, gradient: torch.Tensor) -> bool:
    """Whether a parameter and its gradient begin where the run ends."""
    begins = (place.group, place.start) == (run.group, run.start + run.blocks * BLOCK)
    return begins and _touch(run.gradient, gradient)


def _touch(piece: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a gradient begins where the piece ends, in the same memory."""
    same = gradient.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()
    return same and gradient.storage_offset() == piece.storage_offset() + piece.numel()


class FlatParameters:
    """The buffers, and which parameter stands where. Building one moves the model's parameters into it."""

    def __init__(
        self,
        groups: Sequence[dict],
        copy_dtype: torch.dtype | None = None,
        lazy: torch.nn.Parameter | None = None,
        late: Sequence[Sequence[torch.nn.Parameter]] = (),
        with_moments: bool = True,
        placed: bool = False,
    ):
        """with_moments: false where somebody else keeps them (`adamw8.py`). placed: every gradient has a fixed place,
        not only those of `late` parameters."""
        late_ones = {id(p) for part in late for p in part}
        self.places = list(_places(groups, mixed=copy_dtype is not None, lazy=lazy, late=late_ones))
        if not self.places:
            raise ValueError("there are no parameters to train")
        dtypes = {place.parameter.dtype for place in self.places}
        if copy_dtype is None and len(dtypes) > 1:
            raise ValueError(f"without copy_dtype all parameters must have one dtype, got {sorted(map(str, dtypes))}")
        self.device = self.places[0].parameter.device
        self.dtype = torch.float32 if copy_dtype is not None else dtypes.pop()
        self.n_blocks = sum(place.blocks for place in self.places if not place.lazy)
        """Blocks that every update walks over."""
        self.weight = self._buffer(self.dtype)
        self.exp_avg, self.exp_avg_sq = (
            self._buffer(self.dtype) if with_moments else self.weight.new_empty(0) for _ in range(2)
        )
        self.copy = None if copy_dtype is None else self._buffer(copy_dtype)
        self.blocks = self._block_table()
        self._move_in()
        self.gradient_dtypes = {place.parameter.dtype for place in self.places}
        self.addresses = [place.parameter.data_ptr() for place in self.places]
        self.fixed: dict[int, torch.Tensor] = {}
        """Fixed places of gradients, by the identity of the parameter."""
        self.fixed_buffers: list[torch.Tensor] = []
        """What those are views of."""
        self._fix_gradients([place for place in self.places if place.late or placed])
        self.late_parts = self._late_parts(late)
        at_once = [place for place in self.places if not place.late]
        self.blocks_at_once = self._blocks_of(at_once) if late else None
        """Blocks that are not put off; None where none is."""
        self.long = [i for i, p in enumerate(self.places) if not (p.late or p.lazy) and _is_long(p)]
        """Indices of parameters that are updated at once, and whose gradients are worth a launch of their own."""
        short = [p for p in at_once if not _is_long(p)]
        self.short_blocks = self._blocks_of(short) if self.long else self.blocks_at_once
        """Blocks at once without those."""

    def _blocks_of(self, places: Iterable[Place]) -> torch.Tensor:
        numbers = torch.arange(self.n_blocks, dtype=torch.int32, device=self.device)
        return torch.cat([numbers[:0], *(numbers[p.start // BLOCK :][: p.blocks] for p in places if not p.lazy)])

    def _fix_gradients(self, places: Sequence[Place]) -> None:
        """Parameters that are neighbours have gradients that are neighbours, in the same order."""

        def size(dtype: torch.dtype) -> int:
            return BLOCK * sum(p.blocks for p in places if p.parameter.dtype == dtype)

        buffers = {d: torch.zeros(size(d), dtype=d, device=self.device) for d in self.gradient_dtypes}
        starts = dict.fromkeys(self.gradient_dtypes, 0)
        for place in places:
            parameter, dtype = place.parameter, place.parameter.dtype
            view = buffers[dtype][starts[dtype] : starts[dtype] + parameter.numel()].view(parameter.shape)
            starts[dtype] += place.blocks * BLOCK
            self.fixed[id(parameter)] = view
            parameter.gradient_place = view  # ty: ignore[missing-attribute]
        self.fixed_buffers = [buffer for buffer in buffers.values() if buffer.numel()]

    def _late_parts(self, late: Sequence[Sequence[torch.nn.Parameter]]) -> list[LatePart]:
        by_identity = {id(place.parameter): place for place in self.places}
        parts = []
        for part in late:
            places = [by_identity[id(p)] for p in part]
            parts.append(LatePart(places, [self.fixed[id(p)] for p in part], self._runs(places)))
        return parts

    def _runs(self, places: Iterable[Place]) -> list[Run]:
        runs: list[Run] = []
        for place in sorted(places, key=lambda p: p.start):
            gradient = self.fixed[id(place.parameter)]
            blocks, first = place.blocks, gradient.storage_offset()
            if runs and _go_on(runs[-1], place, gradient):
                blocks, first = blocks + runs[-1].blocks, runs[-1].gradient.storage_offset()
                place = place._replace(start=runs.pop().start)
            whole = gradient.as_strided((blocks * BLOCK,), (1,), first)
            runs.append(Run(place.start, blocks, place.group, whole))
        return runs

    def run_of(self, index: int, gradient: torch.Tensor) -> Run:
        """One of the `long` parameters, with its gradient where it is."""
        place = self.places[index]
        return Run(place.start, place.blocks, place.group, gradient.view(-1))

    def late_gradients(self, without: Container[int] = ()) -> list[torch.Tensor]:
        """What is put off, as few long pieces of whole blocks; `without` the parameters of these identities."""
        pieces: list[torch.Tensor] = []
        for place in self.places:
            if not place.late or id(place.parameter) in without:
                continue
            gradient = self.fixed[id(place.parameter)]
            first, size = gradient.storage_offset(), place.blocks * BLOCK
            if pieces and _touch(pieces[-1], gradient):
                first, size = pieces[-1].storage_offset(), pieces.pop().numel() + size
            pieces.append(gradient.as_strided((size,), (1,), first))
        return pieces

    def _buffer(self, dtype: torch.dtype) -> torch.Tensor:
        blocks = sum(place.blocks for place in self.places)
        return torch.zeros(blocks * BLOCK, dtype=dtype, device=self.device)

    def _block_table(self) -> torch.Tensor:
        """(5, n_blocks) int32: parameter, offset inside it, real elements, group, fp32 gradient. Made where it stays: a
        model of a billion parameters has 600,000 blocks, which took a processor a quarter of a second."""
        table = torch.empty((5, self.n_blocks), dtype=torch.int32, device=self.device)
        first = 0
        for index, place in enumerate(self.places):
            if place.lazy:
                continue
            columns = table[:, first : first + place.blocks]
            columns[0] = index
            columns[1] = torch.arange(0, place.blocks * BLOCK, BLOCK, dtype=torch.int32, device=self.device)
            columns[2] = BLOCK
            columns[2, place.blocks - 1 :] = place.parameter.numel() - (place.blocks - 1) * BLOCK
            columns[3] = place.group
            columns[4] = int(place.full_precision and self.dtype == torch.float32)
            first += place.blocks
        return table

    @torch.no_grad()
    def _move_in(self) -> None:
        for place in self.places:
            parameter = place.parameter
            place.view(self.weight).copy_(parameter)
            parameter.grad = None
            parameter.__dict__.pop("gradient_place", None)  # an earlier optimizer's
            if self.copy is None or place.full_precision:
                parameter.data = place.view(self.weight)
            else:
                parameter.data = place.view(self.copy).copy_(parameter)

    def attach_gradients(self) -> list[torch.Tensor]:
        """Give every parameter a zeroed gradient at a fixed place; the buffers are returned. Beside fp32 weights the
        sums are fp32 too, whatever the model computes in: in bf16 a sum of equal addends ends at 256 of them."""
        dtype = self.dtype
        self.gradient_dtypes = {dtype}
        if dtype == torch.float32:
            self.blocks[4].fill_(1)
        buffer, start = self._buffer(dtype), 0
        for place in self.places:
            place.parameter.grad_dtype = dtype
            place.parameter.grad = buffer[start : start + place.parameter.numel()].view(place.parameter.shape)
            self.fixed[id(place.parameter)] = place.parameter.grad
            start += place.blocks * BLOCK
        self.fixed_buffers = [buffer]
        return [buffer]

    @torch.no_grad()
    def refresh_weight(self) -> None:
        """Take the weights from the model's parameters again, after something else wrote to those."""
        for place in self.places:
            if self.copy is not None and not place.full_precision:
                place.view(self.weight).copy_(place.parameter)

    @torch.no_grad()
    def refresh_copy(self) -> None:
        """Round the weights into the model's parameters again."""
        if self.copy is not None:
            self.copy.copy_(self.weight)

    def weights_by_name(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, torch.Tensor]:
        """The weights in full precision, by the model's own names (`model.named_parameters()`)."""
        by_identity = {id(place.parameter): place for place in self.places}
        return {
            name: by_identity[id(parameter)].view(self.weight)
            for name, parameter in named_parameters
            if id(parameter) in by_identity
        }

    def check_in_place(self) -> None:
        """Parameters that were moved out again (`model.to(...)`) would no longer be trained: say so."""
        for index, (place, address) in enumerate(zip(self.places, self.addresses)):
            if place.parameter.data_ptr() != address:
                raise RuntimeError(
                    f"parameter {index} of shape {tuple(place.parameter.shape)} was moved after the optimizer was "
                    "built (model.to(), .half(), or an assignment to .data); move the model first, then build"
                )
