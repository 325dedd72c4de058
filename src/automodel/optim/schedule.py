"""Learning rate as a function of the step.

A schedule is a pure function: nothing to save, nothing to get out of step on resume. Shapes and rounding follow
transformers' `get_scheduler`, so that a run here and a run of HF Trainer use the same rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from automodel.optim.config import LRSchedulerConfig


@dataclass(frozen=True)
class Schedule:
    """`lr_at(step, peak)`: the rate of optimizer step `step`, counted from 0."""

    cfg: LRSchedulerConfig
    total_steps: int

    @property
    def warmup_steps(self) -> int:
        if self.cfg.warmup_steps is not None:
            return self.cfg.warmup_steps
        return math.ceil((self.cfg.warmup_ratio or 0.0) * self.total_steps)

    def lr_at(self, step: int, peak: float) -> float:
        if self.cfg.name != "constant" and step < self.warmup_steps:
            return peak * step / max(1, self.warmup_steps)
        share = self._decay(step)
        return self.cfg.min_lr + (peak - self.cfg.min_lr) * share

    def _decay(self, step: int) -> float:
        """Share of the peak above `min_lr` that is left after the warm-up."""
        name, warmup = self.cfg.name, self.warmup_steps
        if name in ("constant", "constant_with_warmup"):
            return 1.0
        if name == "inverse_sqrt":
            timescale = warmup or 10_000
            return 1.0 / math.sqrt((step + timescale - warmup) / timescale)
        if name == "wsd":
            decay_steps = max(1, math.ceil(self.cfg.decay_ratio * self.total_steps))
            left = self.total_steps - step
            return 1.0 if left >= decay_steps else max(0.0, left / decay_steps)
        progress = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        if name == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        if name == "polynomial":
            return (1.0 - progress) ** self.cfg.power
        return 1.0 - progress
