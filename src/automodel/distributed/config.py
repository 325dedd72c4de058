"""The `distributed:` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automodel.config.section import Section


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Section):
    """`distributed:` the parallel layout. One rank runs today; several are understood and come in a later release."""

    target: str | None = None
    """`nemo_automodel.components.distributed.fsdp2.FSDP2Manager` or nothing."""
    strategy: Literal["fsdp2", "ddp"] = "fsdp2"
    """How data-parallel ranks share the work."""
    dp_size: int | None = None
    """Data-parallel ranks; `none` detects the devices."""
    dp_replicate_size: int | None = None
    """Replicas of the sharded model (HSDP)."""
    tp_size: int = 1
    """Tensor-parallel ranks."""
    cp_size: int = 1
    """Context-parallel ranks."""
    ep_size: int = 1
    """Expert-parallel ranks."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel regions."""
    cpu_offload: bool = False
    """Keep sharded parameters and states in host memory."""
    reduce_dtype: str | None = None
    """Dtype of the gradient reduction."""
