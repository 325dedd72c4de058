"""`FlatAdamW` over a model's parameters, in the groups that a run has: those that decay and those that do not."""

from __future__ import annotations

from typing import Any

import torch

from automodel.kernels.flat_adamw import FlatAdamW
from automodel.optim.build import parameter_groups
from automodel.optim.config import OptimizerConfig


def flattened(model: torch.nn.Module, *, weight_decay: float = 1e-2, **options: Any) -> FlatAdamW:
    return FlatAdamW(parameter_groups(model, OptimizerConfig(weight_decay=weight_decay)), **options)
