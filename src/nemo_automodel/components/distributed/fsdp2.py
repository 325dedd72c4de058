"""Alias of `automodel.distributed.config`: the parallel layout is a config section here."""

from automodel.distributed.config import DistributedConfig as FSDP2Manager

__all__ = ["FSDP2Manager"]
