"""Parts of tensors: which piece of a whole this rank holds, how a piece is filled, how a whole is put together.

A sharded tensor is a `DTensor`. Whatever its placements, what one rank holds is one block of neighbouring rows (and
columns), so a piece is described by its offsets and its shape. Several ranks may hold the same piece (replicas); one of
them, the one whose coordinate is 0 along every axis that does not cut the tensor, is the one that writes it.

A tensor that is cut twice along one dimension (tensor parallel and shards) was cut by the innermost axis of the mesh
first. Cuts are torch's chunks: all of equal size, rounded up, the last ones shorter or empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """What this rank holds of one tensor."""

    local: Tensor
    """May be empty."""
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""
    writes: bool
    """True on one of the ranks that hold this piece."""

    @property
    def slices(self) -> Slices:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.local.shape))


def piece_of(tensor: Tensor) -> Piece:
    """The piece of a DTensor; of a plain tensor, which every rank holds, the whole."""
    if not isinstance(tensor, DTensor):
        first = not dist.is_initialized() or dist.get_rank() == 0
        return Piece(tensor, (0,) * tensor.dim(), tuple(tensor.shape), first)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is part of every mesh"
    starts, sizes, writes = [0] * tensor.dim(), list(tensor.shape), _in_first_copy(mesh)
    for axis in reversed(range(mesh.ndim)):
        dim = cut_dimension(tensor.placements[axis])
        if dim is not None:
            chunk = -(-sizes[dim] // mesh.size(axis))
            start = min(coordinate[axis] * chunk, sizes[dim])
            starts[dim] += start
            sizes[dim] = min(chunk, sizes[dim] - start)
        else:
            writes = writes and coordinate[axis] == 0
    local = tensor.to_local()
    assert tuple(local.shape) == tuple(sizes), (tuple(local.shape), sizes, tensor.placements)
    return Piece(local, tuple(starts), tuple(tensor.shape), writes)


def cut_dimension(placement: Any) -> int | None:
    """The dimension that an axis of the mesh cuts; none where its ranks hold copies. A dimension that is cut twice has
    a placement of its own class on the outer axis."""
    return placement.dim if isinstance(placement, Shard) or hasattr(placement, "split_factor") else None


def _in_first_copy(mesh: Any) -> bool:
    """Whether this mesh is the first of those that lie side by side (one for each tensor-parallel rank)."""
    return int(mesh.mesh.flatten()[0]) == 0


@torch.no_grad()
def fill(target: Tensor, read: Callable[[Slices], Tensor]) -> None:
    """Puts into `target` its part of a whole, which `read` gives by slices."""
    piece = piece_of(target)
    if piece.local.numel():
        piece.local.copy_(read(piece.slices))


def cut_like(whole: Tensor, model: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor that is laid out as `model` is, with the numbers of `whole` (or of anything that can be sliced)."""
    target = torch.empty_like(model, dtype=dtype or model.dtype)
    fill(target, lambda slices: whole[slices])
    return target


@torch.no_grad()
def whole_of(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank, for a moment; all ranks call this together."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not any(hasattr(placement, "split_factor") for placement in tensor.placements):
        return tensor.full_tensor()
    # Cut twice along one dimension: torch gathers this in two rounds, and warns about it every time.
    piece, whole = piece_of(tensor), torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if piece.writes:
        whole[piece.slices] = piece.local
    dist.all_reduce(whole)
    return whole


def whole_by_whole(tensors: Mapping[str, Tensor], keeps: bool) -> Iterator[tuple[str, Tensor]]:
    """All tensors, whole, in host memory, on the ranks that keep them; all ranks go through this together. One at a
    time: no device ever holds more than one."""
    for name, tensor in tensors.items():
        whole = whole_of(tensor.detach())
        yield name, whole.to("cpu", copy=True) if keeps else whole


def held_elements(tensors: Iterable[Tensor]) -> int:
    """Numbers that this rank holds itself."""
    return sum(piece_of(tensor).local.numel() for tensor in tensors)
