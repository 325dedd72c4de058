"""A copy of tensors as they are now, made so that training hardly waits for it.

Where the tensors are on a GPU, the copy is made by the training stream itself, in its order, so nobody has to stop and
ask whether a step is done. It goes, in order of preference,

    device   into spare memory of the GPU: 15 GB in 7 ms on an H200, and the disk takes its time afterwards;
    host     into page-locked memory of the host, over the bus by a stream of its own, which the training stream waits
             for: the GPU stands still for a third of a second for 15 GB, the host does not;
    none     nowhere: there is no room, and whoever wants a checkpoint writes it before training goes on.

Where they are in the host's memory they are cloned there, several at a time: new pages cost as much as the copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import psutil
import torch
from torch import Tensor

from automodel.checkpoint.parts import Part, neighbours
from automodel.checkpoint.tensor_file import bus_of
from automodel.distributed.gpu_memory import free_bytes

Groups = dict[str, dict[str, Part]]
"""What a rank writes, by group and name."""
Place = Literal["device", "host", "held"]

ALIGNMENT = 256  # as the allocator aligns; wide loads need 16
BLOCK = 1 << 28  # page-locked memory is taken in blocks of at least this: the allocator rounds up to powers of two
LITTLE = 1 << 26  # bytes that are copied sooner than threads are started
LEAST_SPARE = 1 << 30  # of a GPU's memory: steps of new shapes are still recorded later


@dataclass(frozen=True)
class Snapshot:
    """Tensors that nobody changes any more."""

    groups: Groups
    place: Place
    ready: tuple[torch.cuda.Event, ...] = ()

    def wait(self) -> None:
        """Returns when the copies are made. For the thread that writes: training need not ask."""
        for event in self.ready:
            event.synchronize()


class Camera:
    """Takes snapshots; remembers that a GPU had no room, so as not to try again at every save."""

    def __init__(self):
        self.device_is_full = False
        self.copied = 0
        """Bytes of the last snapshot on a GPU: steps beside it look as if they had needed them too."""
        self.peak = 0
        """Bytes that steps have needed at once, or are known to need."""

    def take(self, groups: Groups, beside: int = 1) -> Snapshot | None:
        """The parts as they are now; None where there is no room for a copy. `beside`: ranks of this machine that take
        one at the same time, each of which may have its share of the free memory and no more."""
        every = [(group, name, part.data) for group, parts in groups.items() for name, part in parts.items()]
        on_gpu = [item for item in every if item[2].is_cuda]
        on_host = [item for item in every if not item[2].is_cuda]
        available = psutil.virtual_memory().available // beside
        if _bytes(on_host) > available // 2:
            return None
        copies: dict[tuple[str, str], Tensor] = {}
        place: Place = "host"
        events: list[torch.cuda.Event] = []
        if on_gpu:
            taken = self._of_gpu([data for _, _, data in on_gpu], available)
            if taken is None:
                return None
            place, made, events = taken
            copies |= {(group, name): copy for (group, name, _), copy in zip(on_gpu, made, strict=True)}
        made = _cloned([data for _, _, data in on_host])
        copies |= {(group, name): copy for (group, name, _), copy in zip(on_host, made, strict=True)}
        taken_of = {
            group: {name: replace(part, data=copies[group, name]) for name, part in parts.items()}
            for group, parts in groups.items()
        }
        return Snapshot(taken_of, place, tuple(events))

    def hold(self, groups: Groups) -> Snapshot:
        """The parts themselves, for whoever knows that nobody changes them any more."""
        events = []
        for device in _gpus_of(groups):
            events.append(torch.cuda.Event())
            events[-1].record(torch.cuda.current_stream(device))
        return Snapshot(groups, "held", tuple(events))

    def _of_gpu(
        self, tensors: Sequence[Tensor], available: int
    ) -> tuple[Place, list[Tensor], list[torch.cuda.Event]] | None:
        device = tensors[0].device
        size = sum(_rounded(tensor) for tensor in tensors)
        self.peak = max(self.peak, torch.cuda.max_memory_allocated(device) - self.copied)
        if not self.device_is_full and has_room(device, size, self.peak):
            self.copied = size
            try:
                copies = _places_for(tensors, torch.empty(size, dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError:  # free memory in pieces
                self.device_is_full = True
            else:
                _copy(copies, tensors)
                ready = torch.cuda.Event()
                ready.record(torch.cuda.current_stream(device))
                return "device", copies, [ready]
        if 3 * size > available:  # rounded up to twice the size, and the system wants some as well
            return None
        return "host", *_over_the_bus(tensors)


def let_devices_finish(groups: Groups) -> None:
    """Other threads read the tensors, and do not know the stream that wrote them."""
    for device in _gpus_of(groups):
        torch.cuda.synchronize(device)


def _gpus_of(groups: Groups) -> set[torch.device]:
    return {part.data.device for parts in groups.values() for part in parts.values() if part.data.is_cuda}


def _cloned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in the host's memory; several at a time where there is much to copy."""

    def clone(tensor: Tensor) -> Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    if sum(tensor.numel() * tensor.element_size() for tensor in tensors) < LITTLE:
        return [clone(tensor) for tensor in tensors]
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(clone, tensors))


def has_room(device: torch.device, size: int, peak: int) -> bool:
    """Whether the GPU can hold so much besides what it holds and will need again. `peak`: bytes that steps have needed
    at once. Between two steps most of that lies in the allocator's cache; whoever took it would leave the next step,
    which runs before the copy is on the disk, without memory."""
    _, total = torch.cuda.mem_get_info(device)
    needed = max(peak, torch.cuda.memory_allocated(device))
    return size + max(LEAST_SPARE, total // 20) <= free_bytes(device) + torch.cuda.memory_reserved(device) - needed


@torch.no_grad()
def _copy(copies: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """A launch or two for all tensors of a dtype."""
    for dtype in {tensor.dtype for tensor in tensors}:
        alike = [(copy, tensor.detach()) for copy, tensor in zip(copies, tensors) if tensor.dtype == dtype]
        torch._foreach_copy_([copy for copy, _ in alike], [tensor for _, tensor in alike])


@torch.no_grad()
def _over_the_bus(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[torch.cuda.Event]]:
    device = tensors[0].device
    training, way = torch.cuda.current_stream(device), bus_of(device)
    copies: list[Tensor] = []
    sizes = {index: _rounded(tensor) for index, tensor in enumerate(tensors)}
    for batch in neighbours(sizes, BLOCK):
        block = torch.empty(sum(sizes[index] for index in batch), dtype=torch.uint8, pin_memory=True)
        copies += _places_for([tensors[index] for index in batch], block)
    way.wait_stream(training)
    with torch.cuda.stream(way):
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
    training.wait_event(ready)  # the next step must not change what is still being read
    return copies, [ready]


def _places_for(tensors: Sequence[Tensor], memory: Tensor) -> list[Tensor]:
    """A contiguous tensor of each one's shape and dtype, one after the other in the memory."""
    places, start = [], 0
    for tensor in tensors:
        end = start + tensor.numel() * tensor.element_size()
        places.append(memory[start:end].view(tensor.dtype).view(tensor.shape))
        start += _rounded(tensor)
    return places


def _rounded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def _bytes(items: Sequence[tuple[str, str, Tensor]]) -> int:
    return sum(data.numel() * data.element_size() for _, _, data in items)
