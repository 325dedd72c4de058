"""Batches on their way to a captured step, which reads each shape's batch at a fixed address.

The host copies one small block into page-locked memory and goes on. The block crosses the bus on a stream of its own,
beside the step before, through a ring of slots; what the step waits for is a copy inside the device. Three things must
not happen, and nobody waits for the device to prevent them: the host fills a slot whose last batch has not left it
(`arrived`), the bus fills one whose last batch a step has not taken (`taken`), a step takes what has not arrived.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from automodel.data.batch import PackedBatch

SLOTS = 4  # batches that may be on their way to the device before the host has to wait for one
ALIGNMENT = 16


@dataclass(frozen=True)
class Field:
    """Where one tensor of a batch stands in the static buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.size].view(self.dtype).view(self.shape)


class Slot:
    """One of the places a batch passes through on its way: pinned memory, then the device."""

    def __init__(self, host: Tensor, device: Tensor):
        self.host, self.device = host, device
        self.arrived, self.taken = torch.cuda.Event(), torch.cuda.Event()


class Ring:
    """The slots that batches of all shapes pass through, in turn. They are made once, and again for a batch twice the
    size of the first: pinning memory takes 30 ms on some hosts, however little it is."""

    def __init__(self, device: str):
        self.device, self.way = device, torch.cuda.Stream()
        self.slots: list[Slot] = []
        self.size = self.turn = 0

    def next(self, size: int) -> Slot:
        """A slot for so many bytes, which the host may fill."""
        if size > self.size:
            host = torch.empty((SLOTS, -(-2 * size // ALIGNMENT) * ALIGNMENT), dtype=torch.uint8, pin_memory=True)
            self.slots = [Slot(*pair) for pair in zip(host, torch.empty_like(host, device=self.device), strict=True)]
            self.size = host.shape[1]  # not before there is memory for it
            self.way.wait_stream(torch.cuda.current_stream())  # whatever lay there before has been read
        slot = self.slots[self.turn]
        self.turn = (self.turn + 1) % SLOTS
        slot.arrived.synchronize()
        return slot


class StaticBatch:
    """One shape's batch at a fixed address, fed through a small ring of slots. Batches cross the bus on a stream of
    their own, beside the step before; what the step waits for is a copy inside the device."""

    def __init__(self, like: PackedBatch, device: str, ring: Ring):
        self.fields: list[Field] = []
        start = 0
        for f in fields(like):
            value = getattr(like, f.name)
            if isinstance(value, Tensor):
                size = value.numel() * value.element_size()
                self.fields.append(Field(f.name, value.dtype, tuple(value.shape), start, size))
                start += -(-size // ALIGNMENT) * ALIGNMENT
        self.divisor = Field("divisor", torch.float32, (1,), start, 4)
        self.size, self.ring = start + ALIGNMENT, ring
        self.buffer = torch.zeros(self.size, dtype=torch.uint8, device=device)
        self.batch = replace(like, **{f.name: f.view(self.buffer) for f in self.fields})
        self.scale = self.divisor.view(self.buffer)

    def send(self, batch: PackedBatch, count: float) -> None:
        """Queues the batch's way to the device; waits only if `SLOTS` earlier ones have not arrived yet."""
        slot = self.ring.next(self.size)
        for f in self.fields:
            f.view(slot.host).copy_(getattr(batch, f.name))
        self.divisor.view(slot.host).fill_(1.0 / count)
        with torch.cuda.stream(self.ring.way):
            slot.taken.wait()
            slot.device[: self.size].copy_(slot.host[: self.size], non_blocking=True)
            slot.arrived.record()
        slot.arrived.wait()
        self.buffer.copy_(slot.device[: self.size])
        slot.taken.record()


def shape_of(batch: PackedBatch) -> tuple:
    """What a captured graph depends on."""
    tensors = ((f.name, getattr(batch, f.name)) for f in fields(batch))
    return tuple((name, tuple(t.shape)) for name, t in tensors if isinstance(t, Tensor))
