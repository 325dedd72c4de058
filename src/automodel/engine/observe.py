"""Watching a loop from outside: `finetune(cfg, observer=…)`.

An observer is told values and answers nothing, so it cannot change a run. The one below does nothing and is the
default; the benchmark has one that takes times. Being watched must not slow a run down: tensors come as they are, on
the device, and reading one waits for it.
"""

from __future__ import annotations

from automodel.engine.step import StepResult
from automodel.metrics.compute import EvalMetrics
from automodel.plan.plan import Plan


class Observer:
    """What a loop tells, in the order it happens. Subclass it and take what is wanted."""

    def model_loaded(self) -> None:
        """Model and optimizer are there; what comes next is done once: trying the largest batch, waiting for kernels,
        compiling blocks. Told again where a smaller batch has to be tried."""

    def loop_begins(self, plan: Plan) -> None:
        """Everything is loaded; the first batch comes next."""

    def step_begins(self) -> None:
        """A batch is there, and its step starts."""

    def step_ends(self, result: StepResult, pauses: bool) -> None:
        """The step has been queued. `pauses`: an evaluation, a checkpoint or the end comes before the next one."""

    def loop_ends(self, validation: EvalMetrics | None) -> None:
        """The last step, its evaluation and its checkpoint are done. Not told where the run diverged."""


NOBODY = Observer()
