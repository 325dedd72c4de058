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

from automodel.config.errors import UserError
from automodel.kernels.flat_adamw import FlatAdamW


class RateOnly(torch.optim.Optimizer):
    """Groups of parameters with a learning rate, and a step that does nothing."""

    def __init__(self, groups: Sequence[Sequence[torch.nn.Parameter]], lr: float):
        super().__init__([{"params": list(group)} for group in groups], {"lr": lr})
        self._opt_called = True  # or the scheduler would warn that nobody stepped

    def step(self, closure: Any = None) -> None:  # ty: ignore[incompatible-method-override]
        """Somebody else steps."""


def trial_scheduler(trainer: Any, steps: int) -> Any:
    """The scheduler that a Trainer would make, on an optimizer that does nothing."""
    kept = trainer.lr_scheduler, trainer._created_lr_scheduler
    trainer.lr_scheduler = None
    shell = RateOnly([[torch.nn.Parameter(torch.zeros(()))]], trainer.args.learning_rate)
    try:
        return trainer.create_scheduler(steps, optimizer=shell)
    finally:
        trainer.lr_scheduler, trainer._created_lr_scheduler = kept


class StateOnly:
    """Whatever is saved or loaded as an optimizer's state."""

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values


def for_torch(state: dict[str, Any], rate: float, peak: float) -> StateOnly:
    """The flat optimizer's state as torch's AdamW has it: with the current rate, and without our additions."""
    moments = {
        index: {key: value for key, value in kept.items() if key != "weight"} for index, kept in state["state"].items()
    }
    groups = [{**group, "lr": rate, "initial_lr": peak} for group in state["param_groups"]]
    return StateOnly({"state": moments, "param_groups": groups})


def load_moments(optimizer: FlatAdamW, state: dict[str, Any]) -> None:
    """Moments and step counts of torch's AdamW; rates stay those of this run's table."""
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    groups = [{"params": saved["params"], **mine} for saved, mine in zip(state["param_groups"], own)]
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})


def shift_rates(flat: FlatAdamW, steps_done: int) -> None:
    """After a second call of `train()` the optimizer has counted more steps than this run: its table of rates, which it
    reads by its own count, begins later."""
    ahead = int(flat.step_count) - steps_done
    factors = flat.device_state.lr_factors
    if ahead > 0 and factors is not None:
        flat.device_state.lr_factors = torch.cat([factors.new_zeros(ahead), factors])


def take_rates(flat: FlatAdamW, scheduler: Any, peak: float, steps_left: int) -> None:
    """A callback may have set the rate of the next step, in the optimizer that it was shown: into the table with it."""
    groups, due = scheduler.optimizer.param_groups, scheduler.get_last_lr()
    if all(group["lr"] == rate for group, rate in zip(groups, due)):
        return
    rates, factors = {float(group["lr"]) for group in groups}, flat.device_state.lr_factors
    if len(rates) > 1 or factors is None:
        raise UserError(
            f"A callback set the learning rates {sorted(rates)} for groups of the optimizer; on a GPU they have one in "
            "common. Hand the optimizer over (optimizers=(optimizer, scheduler)), and Trainer's own steps run."
        )
    factors[len(factors) - steps_left] = rates.pop() / peak


def hand_over(flat: FlatAdamW, optimizer: torch.optim.Optimizer) -> None:
    """Torch's AdamW over the same parameters takes the captured step's moments, without a copy."""
    steps = float(flat.step_count)
    fused = {id(p): bool(group.get("fused")) for group in optimizer.param_groups for p in group["params"]}
    for place in flat.flat.places:
        parameter = place.parameter
        device = parameter.device if fused.get(id(parameter)) else "cpu"
        step = torch.tensor(steps, dtype=torch.float32, device=device)
        optimizer.state[parameter] = {"step": step, **flat.moments_of(place)}
