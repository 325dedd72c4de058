"""Tensors to a `.safetensors` file, hashed on the way.

The library's own writer first makes a copy of every tensor as a Python bytes object, and the SHA-256 of the manifest
then reads the file back. Here each tensor goes straight from its memory to the file while another thread hashes it, so
a file takes as long as the slower of the two; both leave Python's lock alone, so several files are written at once.
The disk begins with the first bytes, not when the last are there and are to be flushed.

A tensor on a GPU crosses the bus in chunks, on a stream of its own and through page-locked memory, the next chunk while
this one is written: no stream of anybody else's waits, and the host never holds more than a few chunks.

The format: eight bytes with the length of a JSON header, the header (name, dtype, shape and place of each tensor), and
the bytes of all tensors without gaps. Wider dtypes come first, so every tensor is aligned to its own size.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automodel.checkpoint.disk import Written

CHUNK = 1 << 25  # bytes between two looks at the other thread: 10 ms of work
WRITERS = 4  # files at once; more would be faster than disks are, and take processors from training
AHEAD = 1 << 27  # bytes after which the disk is told to begin
SEAT = 1 << 23  # bytes that cross the bus at once; page-locking larger buffers would hold up the driver for longer

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


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> Written:
    """Writes the file and returns once it is on the disk. `notes` go into its header, beside the tensors."""
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1) as other:
        hashed = other.submit(digest.update, b"")
        for chunk in _chunks(tensors, notes):
            hashed.result()  # never further behind than a chunk
            hashed = other.submit(digest.update, chunk)
            _put(file, chunk)
        hashed.result()
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return Written(size, digest.hexdigest())


def write_side_by_side(folder: Path, files: Iterable[File]) -> dict[str, Written]:
    """Several files at once, all of them on the disk when it returns. The first one that cannot be written ends it."""
    named = {name: (tensors, notes) for name, tensors, notes in files}
    threads = ThreadPoolExecutor(WRITERS)
    try:
        written = {name: threads.submit(write_tensors, folder / name, *content) for name, content in named.items()}
        for file in as_completed(written.values()):
            file.result()
    finally:
        threads.shutdown(cancel_futures=True)  # after an error, or Ctrl-C, none is begun any more
    return {name: file.result() for name, file in written.items()}


def write_unhashed(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
    """The same file, once the devices have made the tensors; whoever wants it on the disk flushes it."""
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    with path.open("wb") as file:
        for chunk in _chunks(tensors, notes):
            _put(file, chunk)


def _chunks(tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None) -> Iterator[Any]:
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    yield _header(ordered, notes)
    bus = Bus()
    for tensor in ordered.values():
        yield from bus.chunks_of(tensor)


def _put(file: Any, chunk: Any) -> None:
    """Writes, and lets the disk begin with every `AHEAD` bytes: Linux does, and returns, when it is told that pages are
    not needed any more. It keeps those that are not on the disk yet."""
    before = file.tell()
    file.write(chunk)
    after = file.tell()
    if before // AHEAD != after // AHEAD and hasattr(os, "posix_fadvise"):
        file.flush()
        with suppress(OSError):  # a hint, which some file systems do not take
            os.posix_fadvise(file.fileno(), max(0, before - AHEAD), AHEAD + after - before, os.POSIX_FADV_DONTNEED)


class Bus:
    """The way of a tensor's bytes to the host."""

    SEATS = 3  # one is written, one may still be hashed, one is on its way

    def __init__(self):
        self.stream: torch.cuda.Stream | None = None
        self.seats: list[Tensor] = []
        self.turn = 0

    def chunks_of(self, tensor: Tensor) -> Iterator[memoryview]:
        """The tensor's numbers in their order; each chunk is good until the next but one is asked for."""
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.is_cuda:
            if not tensor.is_contiguous():
                torch.cuda.current_stream(flat.device).synchronize()  # the copy that made it so
            yield from self._fetched(flat)
            return
        data = memoryview(flat.numpy())
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]

    def _fetched(self, flat: Tensor) -> Iterator[memoryview]:
        if self.stream is None:
            torch.cuda.set_device(flat.device)  # threads begin with the first, where page-locking would open a context
            self.stream = torch.cuda.Stream(flat.device)
            self.seats = [torch.empty(SEAT, dtype=torch.uint8, pin_memory=True) for _ in range(self.SEATS)]
        under_way: list[tuple[Tensor, torch.cuda.Event]] = []
        for start in range(0, len(flat), SEAT):
            part = flat[start : start + SEAT]
            seat = self.seats[self.turn % self.SEATS][: len(part)]
            self.turn += 1
            with torch.cuda.stream(self.stream):
                seat.copy_(part, non_blocking=True)
                arrived = torch.cuda.Event()
                arrived.record()
            under_way.append((seat, arrived))
            if len(under_way) == 2:
                yield _arrived(*under_way.pop(0))
        for seat, arrived in under_way:
            yield _arrived(seat, arrived)


def _arrived(seat: Tensor, event: torch.cuda.Event) -> memoryview:
    event.synchronize()
    return memoryview(seat.numpy())


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
