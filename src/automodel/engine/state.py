"""`TrainState`: all that a run must remember besides weights, optimizer, randomness and data position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
    """Evaluations since the last improvement."""

    def update(self, step: int, value: float) -> bool:
        sign = 1.0 if self.mode == "max" else -1.0
        improved = self.value is None or sign * (value - self.value) > self.min_delta
        if improved:
            self.value, self.step, self.stale = value, step, 0
        else:
            self.stale += 1
        return improved


@dataclass
class Window:
    """Sums since the last log line. Losses stay on the device until the line is due."""

    steps: int = 0
    loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, result: StepResult) -> None:
        if self.loss.device != result.loss.device:
            self.loss = self.loss.to(result.loss.device)
        self.loss += result.loss
        self.steps += 1

    def mean(self) -> float:
        return float(self.loss) / max(1, self.steps)


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
    total_loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    last_validation: dict[str, float] | None = None

    def add(self, result: StepResult, epoch: float) -> None:
        self.window.add(result)
        if self.total_loss.device != result.loss.device:
            self.total_loss = self.total_loss.to(result.loss.device)
        self.total_loss += result.loss
        self.step += 1
        self.epoch = epoch
        self.tokens += result.tokens
        self.samples += result.samples

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.epoch,
            "tokens": self.tokens,
            "samples": self.samples,
            "train_seconds": self.train_seconds,
            "window_steps": self.window.steps,
            "window_loss": float(self.window.loss),
            "total_loss": float(self.total_loss),
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
            window=Window(value["window_steps"], torch.tensor(value["window_loss"], dtype=torch.float64)),
            total_loss=torch.tensor(value["total_loss"], dtype=torch.float64),
            last_validation=value["last_validation"],
        )
