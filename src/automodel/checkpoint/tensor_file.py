"""Tensors to a `.safetensors` file, hashed on the way.

The library's own writer first makes a copy of every tensor as a Python bytes object, and the SHA-256 of the manifest
then reads the file back. Here each tensor goes straight from its memory to the file while another thread hashes it, so
a file takes as long as the slower of the two; both leave Python's lock alone, so several files are written at once. A
tensor on a GPU is fetched when its turn comes: the writer holds one at a time.

The format: eight bytes with the length of a JSON header, the header (name, dtype, shape and place of each tensor), and
the bytes of all tensors without gaps. Wider dtypes come first, so every tensor is aligned to its own size.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CHUNK = 1 << 25  # bytes between two looks at the other thread: 10 ms of work

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


@dataclass(frozen=True)
class Written:
    """A file as its manifest describes it."""

    size: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Writes the file and returns once it is on the disk."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    header = _header(ordered)
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1) as other:
        hashed = other.submit(digest.update, header)
        file.write(header)
        for tensor in ordered.values():
            data = _bytes_of(tensor)
            for start in range(0, len(data), CHUNK):
                chunk = data[start : start + CHUNK]
                hashed.result()  # never further behind than a chunk
                hashed = other.submit(digest.update, chunk)
                file.write(chunk)
        hashed.result()
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return Written(size, digest.hexdigest())


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    places, start = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which safetensors cannot hold")
        end = start + tensor.numel() * tensor.element_size()
        places[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(places, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's numbers in their order, without a copy where they lie so in the host's memory."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())
