"""Tensors that lie on the disk in parts, read in any other.

A sharded run writes what each rank holds: `model-rank-00003-of-00004.safetensors` has that rank's part of every tensor,
one rectangle each, and the file's own header says where the rectangle begins and how large the whole is. A reader asks
for any rectangle of the whole, for whatever layout it has; the parts that touch it are read, and nothing else of them.
Four ranks may have written what one or two read. What one rank writes for all are whole tensors, in one file or,
where they are many gigabytes, in several (`cut`).

The headers are those of torch.distributed.checkpoint's safetensors storage (`HuggingFaceStorageReader` reads these
files as they are; `WHOLE` is ours, and ignored there). Its own writer plans the save by sending pickles between ranks,
wants every tensor for as long as it writes, and hashes nothing, so it is not used.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from automodel.checkpoint.catalog import DamagedCheckpointError
from automodel.checkpoint.tensor_file import DTYPES, File
from automodel.distributed.world import Alone

WHERE, FORMAT, WHOLE = "DCP_SHARDING_INFO", "DCP_VERSION", "automodel.shapes"
BEGINS = "saved_offsets"
FILE_BYTES, FILES = 1 << 30, 8
"""Of a group that one rank writes: how large its files are at least, and about how many there are at most."""
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

Slices = tuple[slice, ...]
Name = TypeVar("Name")


@dataclass(frozen=True)
class Part:
    """A rectangle of a tensor: what one rank holds of it."""

    data: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @classmethod
    def whole(cls, tensor: Tensor) -> Part:
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold parts of it (a DTensor; its module is not imported to ask)."""
    return hasattr(tensor, "device_mesh")


def parts_of(tensors: Mapping[str, Tensor], ranks: Alone) -> dict[str, Part]:
    """What this rank writes of them."""
    parts = {}
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            from automodel.distributed.shards import piece_of

            piece = piece_of(tensor.detach())
            if piece.writes and (piece.local.numel() or not tensor.numel()):
                parts[name] = Part(piece.local, piece.offsets, piece.shape)
        elif ranks.first:
            parts[name] = Part.whole(tensor)
    return parts


def file_of(group: str, rank: int | None, ranks: int) -> str:
    """The name of a group's file; `rank` None: one file has all of it."""
    return f"{group}.safetensors" if rank is None else f"{group}-rank-{rank:05d}-of-{ranks:05d}.safetensors"


def numbered(group: str, index: int, count: int) -> str:
    """The name of one of several files with whole tensors."""
    return f"{group}-{index + 1:05d}-of-{count:05d}.safetensors"


def neighbours(sizes: Mapping[Name, int], room: int) -> list[list[Name]]:
    """Names in their order, as many together as there is room for; at least one."""
    groups: list[list[Name]] = []
    left = 0
    for name, size in sizes.items():
        if not groups or size > left:
            groups.append([])
            left = room
        groups[-1].append(name)
        left -= size
    return groups


def cut(group: str, sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Tensors of a group, by the file that each goes to. A large group has several, which are written and hashed side
    by side: a processor copies 2 GB a second into a file and hashes 1."""
    total = sum(sizes.values())
    files = neighbours(sizes, -(-total // min(FILES, max(1, total // FILE_BYTES))))
    if len(files) < 2:
        return {file_of(group, None, 1): list(sizes)}
    return {numbered(group, index, len(files)): names for index, names in enumerate(files)}


def header_of_parts(parts: Mapping[str, Part]) -> dict[str, str]:
    """What the file of a rank says about its parts."""
    begins = {name: {BEGINS: list(part.start)} for name, part in parts.items()}
    shapes = {name: list(part.shape) for name, part in parts.items()}
    return {"format": "pt", FORMAT: "1.0", WHERE: json.dumps(begins), WHOLE: json.dumps(shapes)}


def files_to_write(group: str, parts: Mapping[str, Part], ranks: Alone, sharded: bool) -> list[File]:
    """What this rank writes of a group."""
    tensors = {name: part.data for name, part in parts.items()}
    if sharded:
        return [(file_of(group, ranks.rank, ranks.size), tensors, header_of_parts(parts))]
    files = cut(group, {name: tensor.nbytes for name, tensor in tensors.items()})
    return [(file, {name: tensors[name] for name in names}, None) for file, names in files.items()]


@dataclass(frozen=True)
class _Stored:
    """A rectangle in a file."""

    path: Path
    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass
class SavedTensor:
    """A tensor on the disk. `tensor[slices]` reads a part of it."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    stored: list[_Stored] = field(default_factory=list)

    def __getitem__(self, slices: Slices | slice) -> Tensor:
        """Any rectangle; slices with steps are not needed by anybody and not understood."""
        asked = slices if isinstance(slices, tuple) else (slices,)
        asked += (slice(None),) * (len(self.shape) - len(asked))
        begins, ends = [], []
        for part, length in zip(asked, self.shape, strict=True):
            begin, end, step = part.indices(length)
            if step != 1:
                raise ValueError(f"{self.name} is read in rectangles, not every {step} elements")
            begins.append(begin)
            ends.append(max(begin, end))
        return self._read(begins, ends)

    def read(self) -> Tensor:
        return self._read([0] * len(self.shape), list(self.shape))

    def _read(self, begins: Sequence[int], ends: Sequence[int]) -> Tensor:
        wanted = torch.empty([end - begin for begin, end in zip(begins, ends)], dtype=self.dtype)
        for stored in self.stored:
            low = [max(a, b) for a, b in zip(begins, stored.start)]
            high = [min(a, b + n) for a, b, n in zip(ends, stored.start, stored.size)]
            if any(a >= b for a, b in zip(low, high)):
                continue
            there = tuple(slice(a - b, c - b) for a, b, c in zip(low, stored.start, high))
            here = tuple(slice(a - b, c - b) for a, b, c in zip(low, begins, high))
            with safe_open(stored.path, "pt") as file:
                found = file.get_slice(self.name)[there] if there else file.get_tensor(self.name)
            wanted[here] = found
        return wanted


class SavedGroup(Mapping[str, SavedTensor]):
    """The tensors of one group, whoever wrote them. Raises `DamagedCheckpointError` where parts are missing."""

    def __init__(self, folder: Path, group: str):
        self._tensors: dict[str, SavedTensor] = {}
        found: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
        for path in files_of(folder, group):
            self._add(path, found)
        for tensor in self._tensors.values():
            there = sum(math.prod(stored.size) for stored in tensor.stored)
            if there != math.prod(tensor.shape):
                raise DamagedCheckpointError(
                    f"{folder}: the parts of '{tensor.name}' in the files of {group} have {there:,} elements, and the "
                    f"whole has {math.prod(tensor.shape):,}."
                )

    def _add(self, path: Path, found: set[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> None:
        """The rectangles of a file, where they were not `found` in another: replicas are alike."""
        header = _header_of(path)
        notes = header.pop("__metadata__", {})
        begins, shapes = json.loads(notes.get(WHERE, "{}")), json.loads(notes.get(WHOLE, "{}"))
        for name, entry in header.items():
            size = tuple(entry["shape"])
            start = tuple(begins[name][BEGINS]) if begins else (0,) * len(size)
            whole = torch.Size(shapes.get(name, size))
            tensor = self._tensors.setdefault(name, SavedTensor(name, TORCH_DTYPES[entry["dtype"]], whole))
            if (name, start, size) not in found:
                found.add((name, start, size))
                tensor.stored.append(_Stored(path, start, size))

    def __getitem__(self, name: str) -> SavedTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def files_of(folder: Path, group: str) -> list[Path]:
    """The files that make up a group."""
    whole = folder / file_of(group, None, 1)
    if whole.exists():
        return [whole]
    named = re.compile(re.escape(group) + r"-(?P<rank>rank-)?\d+-of-(?P<count>\d+)\.safetensors")
    matches = [match for match in (named.fullmatch(path.name) for path in folder.iterdir()) if match]
    if not matches:
        raise DamagedCheckpointError(f"{whole} is missing.")
    found = sorted(match.string for match in matches)
    if matches[0]["rank"] is None and len(found) != int(matches[0]["count"]):
        raise DamagedCheckpointError(f"{folder} has {len(found)} of the {int(matches[0]['count'])} files of {group}.")
    return [folder / name for name in found]


def read_whole(folder: Path, group: str) -> dict[str, Tensor]:
    """A group as whole tensors in the host's memory."""
    paths = files_of(folder, group)
    if "-rank-" in paths[0].name:
        return {name: tensor.read() for name, tensor in SavedGroup(folder, group).items()}
    with ThreadPoolExecutor(4) as threads:
        return {name: tensor for tensors in threads.map(load_file, paths) for name, tensor in tensors.items()}


def _header_of(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            return json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
