"""The process groups behind a `Layout`: torch device meshes, made once for a run.

Context-parallel ranks hold the same weights and different tokens, which is just what shards do, so for weights and
gradients they are further shards: the sharding axis of the mesh is shards × cp. Heads are exchanged in groups of their
own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from automodel.distributed.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Grid:
    """The groups this rank belongs to."""

    layout: Layout
    rank: int
    weights: DeviceMesh | None
    """Where `fully_shard` works: (shard) or (replicate, shard)."""
    tensor: DeviceMesh | None
    """The tensor-parallel axis."""
    context: Any = field(default=None)
    """Process group of the context-parallel axis."""

    @property
    def tp_rank(self) -> int:
        return self.layout.tp_rank(self.rank)

    @property
    def cp_rank(self) -> int:
        return self.layout.cp_rank(self.rank)


def make_grid(layout: Layout, rank: int, device: str) -> Grid:
    """The meshes of a run; every rank calls this at the same point."""
    from torch.distributed.device_mesh import init_device_mesh

    weights = tensor = context = None
    if layout.fsdp:
        axes = {"replicate": layout.replicas, "shard": layout.shards * layout.cp, "tp": layout.tp}
        kept = {name: size for name, size in axes.items() if size > 1 or name == "shard"}
        mesh = init_device_mesh(device, tuple(kept.values()), mesh_dim_names=tuple(kept))
        weights = mesh[("replicate", "shard")] if "replicate" in kept else mesh["shard"]
        tensor = mesh["tp"] if "tp" in kept else None
    if layout.cp > 1:
        shape = (layout.data_ranks, layout.cp, layout.tp)
        context = init_device_mesh(device, shape, mesh_dim_names=("data", "cp", "tp")).get_group("cp")
    return Grid(layout, rank, weights, tensor, context)


@torch.no_grad()
def sum_over_all(value: torch.Tensor) -> torch.Tensor:
    """A small tensor summed over every rank, where it lies."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total
