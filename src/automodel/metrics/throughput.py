"""How fast, and how much memory.

`Throughput` counts training only: `pause()` while evaluating or saving, `resume()` after. Its rates are over a sliding
window of recent steps, so that a log line shows the speed of now; totals are over the whole run. On a GPU the host runs
a few steps ahead of the device; over a window that difference vanishes, so no synchronisation is asked for.

`memory_gib` is what the log line and the plan's prediction are compared by: the peak of CUDA's allocator on a GPU, the
process's resident set on the CPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30


@dataclass(frozen=True)
class Mark:
    """Running totals at one moment of training time."""

    active_s: float
    steps: int
    samples: int
    tokens: int


class Throughput:
    """Counts steps, samples and tokens against training time."""

    def __init__(self, window: int = 50, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._started = clock()
        self._paused_s = 0.0
        self._paused_at: float | None = None
        self._marks: deque[Mark] = deque([Mark(0.0, 0, 0, 0)], maxlen=window + 1)

    def update(self, samples: int, tokens: int, steps: int = 1) -> None:
        """A step has been done."""
        last = self._marks[-1]
        self._marks.append(Mark(self.train_s, last.steps + steps, last.samples + samples, last.tokens + tokens))

    def pause(self) -> None:
        """Time from here on is not training (evaluation, checkpoints). Pausing twice is pausing once."""
        if self._paused_at is None:
            self._paused_at = self._clock()

    def resume(self) -> None:
        """Training goes on."""
        if self._paused_at is not None:
            self._paused_s += self._clock() - self._paused_at
            self._paused_at = None

    @property
    def train_s(self) -> float:
        """Seconds spent training, pauses left out."""
        now = self._clock() if self._paused_at is None else self._paused_at
        return now - self._started - self._paused_s

    @property
    def wall_s(self) -> float:
        """Seconds since the counter was made, pauses included."""
        return self._clock() - self._started

    @property
    def totals(self) -> Mark:
        """Steps, samples and tokens so far, and the training time up to the last of them."""
        return self._marks[-1]

    def rates(self) -> dict[str, float]:
        """`tokens_per_s`, `samples_per_s` and `steps_per_s` over the window; zeros before the first step."""
        return _rates(self._marks[0], self._marks[-1])

    def overall(self) -> dict[str, float]:
        """The same over the whole run."""
        return _rates(Mark(0.0, 0, 0, 0), self._marks[-1])

    def seconds_per_epoch(self, steps_per_epoch: float) -> float:
        """Training time of one epoch at the run's mean speed; 0 before the first step."""
        done = self._marks[-1]
        return done.active_s / done.steps * steps_per_epoch if done.steps else 0.0


def _rates(first: Mark, last: Mark) -> dict[str, float]:
    seconds = last.active_s - first.active_s
    if seconds <= 0:
        return {"tokens_per_s": 0.0, "samples_per_s": 0.0, "steps_per_s": 0.0}
    return {
        "tokens_per_s": (last.tokens - first.tokens) / seconds,
        "samples_per_s": (last.samples - first.samples) / seconds,
        "steps_per_s": (last.steps - first.steps) / seconds,
    }


def memory_gib(device: torch.device | str) -> float:
    """Memory in use, in GiB: the allocator's peak on a CUDA device, the process's resident memory elsewhere."""
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device) / GIB
    import psutil

    return psutil.Process().memory_info().rss / GIB


class MemoryMeter:
    """Remembers the highest reading. On the CPU a reading is a moment's, so the peak is that of the moments read."""

    def __init__(self, device: torch.device | str):
        self.device = device
        self.peak_gib = 0.0

    def read(self) -> float:
        """The memory now (see `memory_gib`), kept if it is the highest yet."""
        now = memory_gib(self.device)
        self.peak_gib = max(self.peak_gib, now)
        return now
