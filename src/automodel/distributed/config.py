"""The `distributed:` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from automodel.config.section import Count, Section


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Section):
    """`distributed:` the parallel layout. One rank runs today; several are understood and come in a later release."""

    SLOT: ClassVar[str | None] = "distributed"

    target: str | None = None
    """`nemo_automodel.components.distributed.fsdp2.FSDP2Manager` or nothing."""
    strategy: Literal["fsdp2", "ddp"] = "fsdp2"
    """How data-parallel ranks share the work."""
    dp_size: Count | None = None
    """Data-parallel ranks; `none` detects the devices."""
    dp_replicate_size: Count | None = None
    """Replicas of the sharded model (HSDP)."""
    tp_size: Count = 1
    """Tensor-parallel ranks."""
    cp_size: Count = 1
    """Context-parallel ranks."""
    ep_size: Count = 1
    """Expert-parallel ranks."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel regions."""
    cpu_offload: bool = False
    """Keep sharded parameters and states in host memory."""
    reduce_dtype: str | None = None
    """Dtype of the gradient reduction."""
