"""Alias of `automodel.tasks.loss_config`: the loss is a config section here, and computed as the plan says."""

from automodel.tasks.loss_config import LossConfig as MaskedCrossEntropy

__all__ = ["MaskedCrossEntropy"]
