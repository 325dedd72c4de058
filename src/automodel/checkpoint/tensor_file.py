"""Tensors to a `.safetensors` file, hashed on the way.

The library's own writer first makes a copy of every tensor as a Python bytes object, and the SHA-256 of the manifest
then reads the file back. Here the bytes of a file are gathered in seats of some megabytes, and a full seat goes to the
disk, mostly past the page cache (`disk.py`), while another thread hashes it: a file takes as long as the slower of the
two. Neither holds Python's lock, so several files are written at once.

Tensors of a GPU cross the bus straight into the seats, which are page-locked then, on a stream of their own and while
the seat before is written: no stream of anybody else's waits, and the host never holds more than a few seats.

The format: eight bytes with the length of a JSON header, the header (name, dtype, shape and place of each tensor), and
the bytes of all tensors without gaps. Wider dtypes come first, so every tensor is aligned to its own size.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automodel.checkpoint.disk import NewFile, Written

WRITERS = 4  # files at once; more would be faster than disks are, and take processors from training
SEAT = 1 << 23  # bytes; page-locking larger ones would hold up the driver for longer

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


File = tuple[str, Mapping[str, Tensor], Mapping[str, str] | None]
"""Its name, what is in it, and notes for its header."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None, at_once: bool = True
) -> Written:
    """Writes the file and returns once it is on the disk; not `at_once`: once the system has it, which writes it out in
    its own time. `notes` go into its header, beside the tensors."""
    digest = hashlib.sha256()
    with NewFile(path, at_once) as file, ThreadPoolExecutor(1) as other:
        hashed = other.submit(digest.update, b"")
        for piece in _pieces(tensors, notes):
            hashed.result()  # never further behind than a piece
            hashed = other.submit(digest.update, piece)
            file.write(piece)
        hashed.result()
        if at_once:
            file.flush()
    return Written(file.size, digest.hexdigest())


def write_side_by_side(folder: Path, files: Iterable[File], at_once: bool = True) -> dict[str, Written]:
    """Several files beside each other, as `write_tensors` writes one. The first that cannot be written ends it."""
    named = {name: (tensors, notes) for name, tensors, notes in files}
    threads = ThreadPoolExecutor(WRITERS)
    try:
        written = {
            name: threads.submit(write_tensors, folder / name, *content, at_once) for name, content in named.items()
        }
        for file in as_completed(written.values()):
            file.result()
    finally:
        threads.shutdown(cancel_futures=True)  # after an error, or Ctrl-C, none is begun any more
    return {name: file.result() for name, file in written.items()}


def write_unhashed(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
    """The same file, once the devices have made the tensors; whoever wants it on the disk flushes it."""
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    with NewFile(path) as file:
        for piece in _pieces(tensors, notes):
            file.write(piece)


def _pieces(tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None) -> Iterator[memoryview]:
    """The bytes of the file, in pieces; each is good until the next but one is asked for."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    header = torch.frombuffer(bytearray(_header(ordered, notes)), dtype=torch.uint8)
    seats = Seats(next((tensor.device for tensor in ordered.values() if tensor.is_cuda), None))
    yield from seats.take(header)
    for tensor in ordered.values():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.is_cuda and not tensor.is_contiguous():
            torch.cuda.current_stream(flat.device).synchronize()  # the copy that made it so
        yield from seats.take(flat)
    yield from seats.rest()


class Seats:
    """The way of bytes into a file: places in the host's memory that are filled one after the other."""

    SEATS = 3  # one is written, one may still be hashed, one is being filled

    def __init__(self, gpu: torch.device | None):
        self.gpu, self.stream = gpu, None
        if gpu is not None:
            torch.cuda.set_device(gpu)  # threads begin with the first, where page-locking would open a context
            self.stream = bus_of(gpu)
        self._seats = [_seat(gpu is not None) for _ in range(self.SEATS)]
        self._turn = self._filled = 0
        self._sources: list[Tensor] = []
        """What is being copied into the current seat: it must not go before it has arrived."""
        self._full: list[Full] = []

    def take(self, flat: Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor find their places; yields seats that have become full."""
        start = 0
        while start < len(flat):
            part = flat[start : start + SEAT - self._filled]
            self._copy(self._seats[self._turn][self._filled : self._filled + len(part)], part)
            self._filled += len(part)
            start += len(part)
            if self._filled == SEAT:
                self._next()
            if len(self._full) == 2:  # one is always on its way
                yield self._full.pop(0).arrived()

    def rest(self) -> Iterator[memoryview]:
        """What has not been yielded yet."""
        if self._filled:
            self._next()
        while self._full:
            yield self._full.pop(0).arrived()

    def _copy(self, place: Tensor, part: Tensor) -> None:
        if part.is_cuda:
            with torch.cuda.stream(self.stream):
                place.copy_(part, non_blocking=part.device == self.gpu)
            self._sources.append(part)
        else:
            np.copyto(place.numpy(), part.numpy())  # torch would take all processors for it, in the midst of training

    def _next(self) -> None:
        there = None
        if self.stream is not None:
            there = torch.cuda.Event()
            there.record(self.stream)
        self._full.append(Full(self._seats[self._turn][: self._filled], there, self._sources))
        self._turn, self._filled, self._sources = (self._turn + 1) % self.SEATS, 0, []


@dataclass(frozen=True)
class Full:
    """A seat that is taken."""

    seat: Tensor
    there: torch.cuda.Event | None
    sources: list[Tensor]

    def arrived(self) -> memoryview:
        if self.there is not None:
            self.there.synchronize()
        return memoryview(self.seat.numpy())


@cache
def bus_of(device: torch.device) -> torch.cuda.Stream:
    """The stream on which tensors leave a GPU while it trains; one for all threads, since there is one bus. torch has
    32 streams of each priority and hands them out in turn: a new one for every file would soon be one on which a step
    is just being recorded, and the copies would become part of that step. So it is the only one of its priority."""
    return torch.cuda.Stream(device, priority=-2)


def _seat(page_locked: bool) -> Tensor:
    """Begins with a page, as the straight way to the disk asks for."""
    if page_locked:
        return torch.empty(SEAT, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, SEAT), dtype=torch.uint8)


def _header(tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None) -> bytes:
    places: dict[str, dict[str, Any]] = {"__metadata__": dict(notes)} if notes else {}
    start = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which safetensors cannot hold")
        end = start + tensor.numel() * tensor.element_size()
        places[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(places, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
