"""How fast, and how much memory.

`Throughput` counts training only: `pause()` while evaluating or saving, `resume()` after. Steps are counted when they
are queued, which on a GPU is some steps before they are done; so a rate is asked for when something is known to be
done, and says how much that was. It is over the recent steps, so that a log line shows the speed of now.

`memory_gib` is what the log line and the plan's prediction are compared by: the peak of CUDA's allocator on a GPU, the
process's resident set on the CPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

GIB = 2**30


class Counts(NamedTuple):
    """Running totals."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0


class Throughput:
    """Counts steps, samples and tokens against training time."""

    def __init__(self, window: int = 50, clock: Callable[[], float] = time.perf_counter):
        """`window`: steps that a rate is about, at least; more where it is asked for less often."""
        self._clock = clock
        self._started = clock()
        self._paused_s = 0.0
        self._paused_at: float | None = None
        self.counts = Counts()
        self._window = window
        self._marks: deque[tuple[float, Counts]] = deque([(0.0, Counts())])

    def update(self, samples: int, tokens: int) -> None:
        """A step has been queued."""
        steps, *before = self.counts
        self.counts = Counts(steps + 1, before[0] + samples, before[1] + tokens)

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

    def rates(self, done: Counts) -> dict[str, float]:
        """`tokens_per_s`, `samples_per_s` and `steps_per_s` of the recent steps, now that so much is done."""
        self._marks.append((self.train_s, done))
        while len(self._marks) > 2 and self._marks[1][1].steps <= done.steps - self._window:
            self._marks.popleft()
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        seconds = last_s - first_s
        gained = {f"{name}_per_s": b - a for name, a, b in zip(Counts._fields, first, last)}
        return {name: gain / seconds if seconds > 0 else 0.0 for name, gain in reversed(gained.items())}


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
