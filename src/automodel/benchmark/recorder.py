"""Timing a training loop without slowing it down.

Both sides of a comparison use this one `Recorder`: `begin` before an optimizer step, `end` after it. On a GPU it drops
CUDA events into the stream and reads them when everything is over; the host waits for the device only at the borders
of a *stretch*: after the first step (time to first step), after the warm-up, and where the loop stops for an
evaluation or a checkpoint and would wait anyway. A step's time is from the end of the step before it to its own end,
so waiting for data and launching kernels count; evaluations and checkpoints do not.

Rates come from the stretches (clock on the wall between two moments at which the device was idle), percentiles from
the events. Losses are kept as device tensors and read at the end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stretch:
    """Steps between two moments at which the device had nothing left to do."""

    first_step: int
    steps: int
    seconds: float
    tokens: int
    samples: int


class Recorder:
    """Steps, losses, tokens. `warmup` steps are left out of the steady state."""

    def __init__(self, device: str, warmup: int, started: float):
        """`started` is `time.monotonic()` of the moment before this process was started."""
        self.device = device
        self.cuda = device == "cuda"
        self.warmup = warmup
        self.started = started
        self.marks: dict[str, float] = {}
        self.stretches: list[Stretch] = []
        self._starts: list[Any] = []  # a mark where a step does not follow directly on the one before it, else None
        self._ends: list[Any] = []
        self._losses: list[Any] = []
        self._tokens: list[int] = []
        self._samples: list[int] = []
        self._pending = [0, 0]  # tokens and samples of micro-batches since the last `end`
        self._opened: tuple[int, float] | None = None  # first step of the open stretch, and when it began

    def mark(self, name: str) -> None:
        """Remembers how long after process start something happened."""
        self.marks[name] = time.monotonic() - self.started

    def begin(self) -> None:
        """A step starts. Cheap; only the first step of a stretch needs it."""
        if self._opened is None:
            self._wait()
            self._opened = (len(self._ends), time.perf_counter())
            self._starts.append(self._now())
        else:
            self._starts.append(None)

    def count(self, tokens: int, samples: int) -> None:
        """Real tokens and examples of one micro-batch of the step under way."""
        self._pending[0] += tokens
        self._pending[1] += samples

    def end(self, loss: Any, pause: bool = False) -> None:
        """A step is over; `pause` where an evaluation or a checkpoint comes next."""
        self._ends.append(self._now())
        # A copy: a captured step writes every loss into the same place.
        self._losses.append(loss.detach().clone())
        self._tokens.append(self._pending[0])
        self._samples.append(self._pending[1])
        self._pending = [0, 0]
        done = len(self._ends)
        if done == 1 or done == self.warmup or pause:
            self._close()
            if done == 1:
                self.mark("first_step_s")

    def finish(self) -> None:
        """The loop is over."""
        self._close()

    def _close(self) -> None:
        if self._opened is None:
            return
        first, began = self._opened
        self._wait()
        seconds = time.perf_counter() - began
        tokens, samples = sum(self._tokens[first:]), sum(self._samples[first:])
        self.stretches.append(Stretch(first, len(self._ends) - first, seconds, tokens, samples))
        self._opened = None

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize()

    def step_ms(self) -> list[float]:
        """Milliseconds of every step, in order."""
        self._wait()
        times = []
        for i, end in enumerate(self._ends):
            start = self._ends[i - 1] if self._starts[i] is None else self._starts[i]
            times.append(start.elapsed_time(end) if self.cuda else (end - start) * 1e3)
        return times

    def losses(self) -> list[float]:
        return [float(loss) for loss in self._losses]

    def steady(self) -> list[Stretch]:
        """Stretches after the warm-up; where the run is shorter than that, all but the first step, or all."""
        for first in (self.warmup, 1, 0):
            kept = [s for s in self.stretches if s.first_step >= first and s.steps]
            if kept:
                return kept
        return []

    def numbers(self, steps_per_epoch: int) -> dict[str, Any]:
        """Everything measured, as plain numbers. Read it after `finish`."""
        times, steady = self.step_ms(), self.steady()
        chosen = [times[i] for s in steady for i in range(s.first_step, s.first_step + s.steps)]
        seconds, steps = sum(s.seconds for s in steady), sum(s.steps for s in steady)
        if not steps:
            raise RuntimeError("the loop ended without a step")
        return {
            **self.marks,
            "steps": len(times),
            "steady_steps": steps,
            "ms_per_step": quantile(chosen, 0.5),
            "ms_p20": quantile(chosen, 0.2),
            "ms_p80": quantile(chosen, 0.8),
            "ms_mean": seconds / steps * 1e3,
            "tokens": sum(self._tokens),
            "samples": sum(self._samples),
            "train_s": sum(s.seconds for s in self.stretches),
            "tokens_per_s": sum(s.tokens for s in steady) / seconds,
            "samples_per_s": sum(s.samples for s in steady) / seconds,
            "steps_per_s": steps / seconds,
            "seconds_per_epoch": seconds / steps * steps_per_epoch,
            "step_ms": times,
            "losses": self.losses(),
        }


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of the others lie, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
