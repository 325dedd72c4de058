"""Learning rate as a function of the step.

A schedule is a pure function: nothing to save, nothing to get out of step on resume. Shapes and rounding follow
transformers' `get_scheduler`, name by name, so that a run here and a run of HF Trainer use the same rates. A floor
(`min_lr`) works with every shape that falls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from automodel.optim.config import LRSchedulerConfig

POLYNOMIAL_END = 1e-7  # transformers' `lr_end`


@dataclass(frozen=True)
class Schedule:
    """`lr_at(step, peak)`: the rate of optimizer step `step`, counted from 0."""

    cfg: LRSchedulerConfig
    total_steps: int

    @property
    def warmup_steps(self) -> int:
        given = self.cfg.warmup_steps
        if given is not None and (given == 0 or given >= 1):
            return int(given)
        return math.ceil((given or self.cfg.warmup_ratio or 0.0) * self.total_steps)

    def floor(self, peak: float) -> float:
        """Where the decay ends."""
        if self.cfg.min_lr_ratio is not None:
            return self.cfg.min_lr_ratio * peak
        if self.cfg.min_lr is not None:
            return self.cfg.min_lr
        return POLYNOMIAL_END if self.cfg.name == "polynomial" else 0.0

    def lr_at(self, step: int, peak: float) -> float:
        floor = self.floor(peak)
        if self.cfg.name != "constant" and step < self.warmup_steps:
            return self._warming(step, peak, floor)
        return floor + (peak - floor) * self._decay(step)

    def _warming(self, step: int, peak: float, floor: float) -> float:
        if self.cfg.name == "cosine_warmup_with_min_lr":  # its first step is not wasted on a rate of 0
            return peak * (step + 1) / self.warmup_steps
        share = step / self.warmup_steps
        if self.cfg.name in ("wsd", "warmup_stable_decay"):  # rise from where they will end
            return floor + (peak - floor) * share
        return peak * share

    def _decay(self, step: int) -> float:
        """Share of the peak above the floor that is left after the warm-up."""
        name, warmup = self.cfg.name, self.warmup_steps
        if name in ("constant", "constant_with_warmup"):
            return 1.0
        if name == "inverse_sqrt":
            timescale = self.cfg.timescale or warmup or 10_000
            return 1.0 / math.sqrt((step + timescale - warmup) / timescale)
        if name in ("wsd", "warmup_stable_decay"):
            return self._final_decay(step)
        begun = step + 1 if name == "cosine_warmup_with_min_lr" else step
        progress = (begun - warmup) / max(1, self.total_steps - warmup)
        if name == "cosine_with_restarts":
            cycles = self.cfg.num_cycles or 1
            return 0.0 if progress >= 1.0 else _half_wave(cycles * progress % 1.0)
        if name.startswith("cosine"):
            return _half_wave(2 * (self.cfg.num_cycles or 0.5) * progress)
        progress = min(1.0, progress)
        return (1.0 - progress) ** self.cfg.power if name == "polynomial" else 1.0 - progress

    @property
    def last_phase(self) -> int:
        """Steps at the end of `wsd` in which the rate falls."""
        return self.cfg.decay_steps or max(1, math.ceil(self.cfg.decay_ratio * self.total_steps))

    def _final_decay(self, step: int) -> float:
        steps = self.last_phase
        progress = (step - (self.total_steps - steps)) / steps
        if progress <= 0:
            return 1.0
        if progress >= 1:
            return 0.0
        shape = self.cfg.decay_type or ("linear" if self.cfg.name == "wsd" else "cosine")
        if shape == "cosine":
            return _half_wave(progress)
        return 1.0 - (math.sqrt(progress) if shape == "1-sqrt" else progress)


def _half_wave(x: float) -> float:
    """From 1 at 0 down to 0 at 1, and up again."""
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * x)))
