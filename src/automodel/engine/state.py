"""`TrainState`: all that a run must remember besides weights, optimizer, randomness and data position."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from automodel.config.errors import UserError
from automodel.engine.step import StepResult


@dataclass
class Best:
    """The best evaluation so far, by one metric."""

    metric: str
    mode: str
    min_delta: float = 0.0
    value: float | None = None
    step: int | None = None
    stale: int = 0
    """Evaluations since the last one that was better than the best before it by more than `min_delta`."""

    def update(self, step: int, value: float) -> bool:
        """Whether this one is the best so far. Any gain makes it so; `min_delta` is for patience alone, as the
        threshold of transformers' EarlyStoppingCallback is."""
        sign = 1.0 if self.mode == "max" else -1.0
        # A NaN (a correlation of constant predictions) is never the best, and anything beats having none.
        gain = math.inf if self.value is None else sign * (value - self.value)
        gain = gain if math.isfinite(value) else -math.inf
        self.stale = 0 if gain > self.min_delta else self.stale + 1
        if gain > 0:
            self.value, self.step = value, step
        return gain > 0


@dataclass
class Window:
    """Losses since the last log line. They stay on the device, one small tensor a step, until the line is due."""

    steps: int = 0
    earlier: float = 0.0
    """Sum of losses that were read already, by a checkpoint in the middle of the window."""
    losses: list[Tensor] = field(default_factory=list)
    broke_at: int = 0
    """The first step of the window whose loss is no number, counted from 1; 0: none that was read."""

    def add(self, result: StepResult) -> None:
        self.losses.append(result.loss)
        self.steps += 1

    def send(self) -> None:
        """Lets the losses go to the host, without waiting for them: whoever reads them then has to."""
        if self.losses:
            self.losses = list(torch.stack(self.losses).to("cpu", non_blocking=True).unbind())

    def total(self) -> float:
        """Waits for the device, once for the whole window. Summed step by step, so a restart changes no digit."""
        first = self.steps - len(self.losses) + 1
        for step, loss in enumerate(torch.stack(self.losses).tolist() if self.losses else [], first):
            self.earlier += loss
            self.broke_at = self.broke_at or (0 if math.isfinite(loss) else step)
        self.losses = []
        return self.earlier

    def mean(self) -> float:
        return self.total() / max(1, self.steps)


@dataclass
class TrainState:
    """Where a run stands. Saved as JSON with every checkpoint."""

    best: Best
    step: int = 0
    """Optimizer steps done."""
    epoch: float = 0.0
    tokens: int = 0
    samples: int = 0
    train_seconds: float = 0.0
    """Time spent in training steps, over all restarts."""
    window: Window = field(default_factory=Window)
    closed_loss: float = 0.0
    """Sum of the losses of all windows before this one."""
    last_validation: dict[str, float] | None = None

    def add(self, result: StepResult, epoch: float) -> None:
        self.window.add(result)
        self.step += 1
        self.epoch = epoch
        self.tokens += result.tokens
        self.samples += result.samples

    def next_window(self) -> Window:
        """The losses since the last call, on their way to the host; `close` counts them when they are there."""
        window, self.window = self.window, Window()
        window.send()
        return window

    def close(self, window: Window) -> float:
        """The mean loss of a window that came from here."""
        self.closed_loss += window.total()
        return window.mean()

    def mean_loss(self) -> float:
        return (self.closed_loss + self.window.total()) / max(1, self.step)

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.epoch,
            "tokens": self.tokens,
            "samples": self.samples,
            "train_seconds": self.train_seconds,
            "window_steps": self.window.steps,
            "window_loss": self.window.total(),
            "closed_loss": self.closed_loss,
            "last_validation": self.last_validation,
            "best": vars(self.best),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TrainState:
        return cls(
            best=Best(**value["best"]),
            step=value["step"],
            epoch=value["epoch"],
            tokens=value["tokens"],
            samples=value["samples"],
            train_seconds=value["train_seconds"],
            window=Window(value["window_steps"], value["window_loss"]),
            closed_loss=value["closed_loss"],
            last_validation=value["last_validation"],
        )


def check_same_step(
    saved: dict[str, Any], current: dict[str, Any], before: int, now: int, config: str, given: Sequence[str] = ()
) -> None:
    """Refuses to go on on another number of ranks where a step would have other documents, with the command that keeps
    them. `saved` and `current` describe the loader; what else may differ it says itself. `given`: what belongs into
    that command besides the run's config."""
    keys = ("micro_batch_size", "grad_acc_steps")
    if before == now or all(saved.get(key) == current[key] for key in keys):
        return
    by_size = bool(saved.get("packed_sequence_size"))  # micro-batches are bins then, and the keys count bins
    unit = "bins" if by_size else "examples"
    micro, micro_here = (1, 1) if by_size else (saved["micro_batch_size"], current["micro_batch_size"])
    total, here = micro * saved["grad_acc_steps"], micro_here * current["grad_acc_steps"]
    can = max(ranks for ranks in range(1, now + 1) if total % (micro * ranks) == 0)
    launched = f" --nproc-per-node {can}" if now > 1 else ""
    more = f" {shlex.join(given)}" if given else ""
    fewer = "" if can == now else f", which {now} ranks cannot share and {can} can"
    raise UserError(
        f"--resume: the checkpoint comes from {before} rank{'s' if before > 1 else ''} with {total} {unit} a step in "
        f"micro-batches of {micro}; {now} rank{'s' if now > 1 else ''} with this config would take {here} in "
        f"micro-batches of {micro_here}. Steps must stay the same{fewer}: fix "
        "step_scheduler.global_batch_size (and dataloader.batch_size):\n  "
        f"automodel finetune llm -c {shlex.quote(config)} --resume{launched}{more} "
        f"step_scheduler.global_batch_size={total} dataloader.batch_size={micro}"
    )
