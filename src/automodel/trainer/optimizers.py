"""Optimizers around the captured step, which has its own: one that only has a learning rate, and one that only has a
state.

The captured step looks its rates up in a table on the device, so a scheduler may not touch its optimizer; but
callbacks, log lines and checkpoints ask Trainer's scheduler. It runs on `RateOnly`. Checkpoints hold what torch's AdamW
would have written, so that a run can go on in stock Trainer, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class RateOnly(torch.optim.Optimizer):
    """Parameters with a learning rate, and a step that does nothing."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], lr: float):
        super().__init__(parameters, {"lr": lr})
        self._opt_called = True  # or the scheduler would warn that nobody stepped

    def step(self, closure: Any = None) -> None:  # ty: ignore[invalid-method-override]
        """Somebody else steps."""


class StateOnly:
    """Whatever is saved or loaded as an optimizer's state."""

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values


def for_torch(state: dict[str, Any], rate: float, peak: float | None = None) -> StateOnly:
    """The flat optimizer's state as torch's AdamW has it: with the current rate, and without our additions."""
    if not state:
        return StateOnly({})
    moments = {
        index: {key: value for key, value in entry.items() if key != "weight"}
        for index, entry in state["state"].items()
    }
    groups = [{**group, "lr": rate} for group in state["param_groups"]]
    if peak is not None:
        groups = [{**group, "initial_lr": peak} for group in groups]
    return StateOnly({"state": moments, "param_groups": groups})


def after_training(trainer: Any, state: StateOnly) -> torch.optim.Optimizer:
    """Torch's AdamW over the trained model with the captured step's moments, for whoever goes on with it."""
    trainer.optimizer = None
    optimizer = trainer.create_optimizer()
    optimizer.load_state_dict(state.values)
    return optimizer
