"""The `distributed:` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from automodel.config.section import Count, Section


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Section):
    """`distributed:` the parallel layout. Data-parallel ranks (`ddp`) train together; sharded models, tensor and
    context parallelism are understood and come in a later release."""

    SLOT: ClassVar[str | None] = "distributed"

    target: str | None = None
    """`nemo_automodel.components.distributed.fsdp2.FSDP2Manager` or nothing."""
    strategy: Literal["fsdp2", "ddp"] | None = None
    """How data-parallel ranks share the work: `ddp`, every rank holds the model (the default), or `fsdp2`, which shards
    it and comes in a later release (it is what `_target_` asks for)."""
    dp_size: Count | None = None
    """Data-parallel ranks; `none` takes those that were started. A number starts as many on this machine."""
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

    @property
    def shards(self) -> bool:
        """Whether the model is to be sharded over the data-parallel ranks."""
        return self.strategy == "fsdp2" or (self.strategy is None and self.target is not None)
