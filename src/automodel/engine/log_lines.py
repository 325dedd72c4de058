"""Log lines, written when their numbers have come from the device.

A line tells the mean loss since the one before it. Asked for at once, the host would wait for the step that the line
ends with, and the device would have nothing to do while the next batch is made and, where its shape is new, recorded:
a tenth of a second for Llama 1B. So the numbers are sent off when a line is due, and it is written when they are there,
a few steps later; at the latest before the next line, an evaluation, a checkpoint or the end.
"""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from automodel.engine.build import Run, now
from automodel.engine.diverged import diverged
from automodel.engine.state import Window
from automodel.engine.step import StepResult
from automodel.metrics.throughput import Counts, MemoryMeter, Throughput


class Arrival(Protocol):
    """When what was sent is there; a CUDA event is one."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class AtOnce:
    """On the CPU, where nothing has to be sent."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def sent_now(device: str) -> Arrival:
    """When all that the device was asked for until now is done."""
    if device != "cuda":
        return AtOnce()
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(frozen=True)
class Line:
    """What is told of a step, on its way."""

    step: int
    window: Window
    """The losses since the line before."""
    grad_norm: Tensor
    lr: float
    epoch: float
    done: Counts
    """What is done when the line is there."""
    arrival: Arrival


class LogLines:
    """The log of a run: one line may be on its way."""

    def __init__(self, run: Run, throughput: Throughput, memory: MemoryMeter):
        self.run, self.throughput, self.memory = run, throughput, memory
        self.device = run.prepared.plan.device
        self.line: Line | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with nullcontext() if error is None else suppress(Exception):  # an error is what will be told
            self.finish()

    def due(self, result: StepResult) -> None:
        """A line ends with this step."""
        self.finish()
        state = self.run.state
        window = state.next_window()
        # The norm lies where the next step writes its own.
        norm = result.grad_norm.detach().to("cpu", non_blocking=True, copy=True)
        arrival = sent_now(self.device)
        self.line = Line(state.step, window, norm, result.lr, state.epoch, self.throughput.counts, arrival)

    def end(self, result: StepResult) -> None:
        """The run ends with this step, before a line was due."""
        if self.run.state.window.steps:
            self.due(result)
        self.finish()

    def write(self, wait: bool) -> None:
        """The line that is on its way, if it is there; `wait`: when it is."""
        if self.line is not None and (wait or self._is_there(self.line)):
            self.finish()

    def _is_there(self, line: Line) -> bool:
        if self.run.prepared.ranks.together:
            # A loss that is no number ends the run, and must end it on all ranks after the same step.
            return self.run.state.step > line.step
        return line.arrival.query()

    def finish(self) -> None:
        """Waits for the line that is on its way, if there is one."""
        if self.line is None:
            return
        line, self.line = self.line, None
        line.arrival.synchronize()
        loss = self.run.state.close(line.window)
        values = {
            "loss": loss,
            "lr": line.lr,
            "grad_norm": float(line.grad_norm),
            **self.throughput.rates(line.done),
            "memory_gib": self.memory.read(),
            "epoch": line.epoch,
        }
        self.run.progress.step(line.step, values)
        self.run.trackers.log(line.step, {**values, "time": now() - self.run.started}, "train")
        if not math.isfinite(loss):
            raise diverged(self.run, "loss", loss, line.step, line.window)
