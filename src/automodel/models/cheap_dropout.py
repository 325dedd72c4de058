"""`nn.Dropout` modules that draw cheap random bits while they train on the CPU (`kernels/cpu_dropout.py`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from automodel.kernels.cpu_dropout import cpu_dropout


class CheapDropout:
    """Takes the place of a dropout's `forward`."""

    def __init__(self, module: nn.Dropout):
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        if not self.module.training or x.device.type != "cpu":
            return nn.Dropout.forward(self.module, x)
        return cpu_dropout(x, self.module.p)


def use_cheap_dropout(model: Any) -> int:
    """Swaps every plain dropout of the model; returns how many."""
    plain = [m for m in model.modules() if type(m) is nn.Dropout and 0.0 < m.p < 1.0 and not m.inplace]
    for module in plain:
        module.forward = CheapDropout(module)
    return len(plain)
