"""Alias of `automodel.losses.config`: the loss is a config section here, and computed as the plan says."""

from automodel.losses.config import LossConfig as FusedLinearCrossEntropy

__all__ = ["FusedLinearCrossEntropy"]
