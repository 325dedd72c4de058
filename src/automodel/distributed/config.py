"""The `distributed:` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from automodel.config.section import Ranks, Section

ReduceDtype = Literal["fp32", "float32", "torch.float32", "bf16", "bfloat16", "torch.bfloat16"]


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Section):
    """`distributed:` the parallel layout: ranks = dp × cp × tp. Every layout trains what one process trains, at the
    same `global_batch_size` (docs/ranks.md)."""

    SLOT: ClassVar[str | None] = "distributed"

    target: str | None = None
    """`nemo_automodel.components.distributed.fsdp2.FSDP2Manager` or nothing."""
    strategy: Literal["fsdp2", "ddp"] | None = None
    """How data-parallel ranks share the work: `ddp`, every rank holds the model (the default), or `fsdp2`, every rank
    holds a part of weights, gradients and optimizer states (what `_target_` asks for, and `tp_size` and `cp_size`
    need)."""
    dp_size: Ranks | None = None
    """Data-parallel ranks; `none`: those that were started, or all visible GPUs. A number starts as many on this
    machine."""
    dp_replicate_size: Ranks | None = None
    """Replicas of the sharded model (HSDP): shards within each, gradients summed between them. Divides `dp_size`."""
    tp_size: Ranks = 1
    """Tensor-parallel ranks: neighbours that share every matrix and the vocabulary. Divides the heads."""
    cp_size: Ranks = 1
    """Context-parallel ranks: neighbours that share the tokens of a batch."""
    ep_size: Ranks = 1
    """Expert-parallel ranks; models with experts come in a later release."""
    sequence_parallel: bool = False
    """Share the tokens among tensor-parallel ranks where nothing is cut: norms and residuals."""
    cpu_offload: bool = False
    """Keep this rank's parts of parameters, gradients and states in host memory (GPUs, `fsdp2`)."""
    reduce_dtype: ReduceDtype | None = None
    """What gradients are summed in between ranks; fp32 where nothing is said. bf16 halves the traffic."""

    @property
    def shards(self) -> bool:
        """Whether the model is to be sharded over the data-parallel ranks."""
        return self.strategy == "fsdp2" or (self.strategy is None and self.target is not None)
