"""This library as a side: `finetune` itself, watched step by step.

What runs is exactly what `automodel finetune llm` runs: the config is loaded, planned, trained, evaluated and saved by
the engine. Only the step is wrapped, by an object that tells the recorder when it begins and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from automodel.benchmark.machine import GpuWatch, LoadWatch, peak_memory
from automodel.benchmark.recorder import Recorder
from automodel.benchmark.sides import Side


class WatchedStep:
    """A training step that tells the recorder about itself; everything else is the step's own."""

    def __init__(self, step: Any, recorder: Recorder, plan: Any):
        self.step, self.recorder, self.plan = step, recorder, plan

    def __call__(self, index: int, batch: Any) -> Any:
        self.recorder.begin()
        result = self.step(index, batch)
        self.recorder.count(result.tokens, result.samples)
        self.recorder.end(result.loss, pause=self._pauses_after(index + 1))
        return result

    def _pauses_after(self, step: int) -> bool:
        intervals = (self.plan.val_every_steps, self.plan.ckpt_every_steps, self.plan.total_steps)
        return any(interval and step % interval == 0 for interval in intervals)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)


def train_with_automodel(
    job: Path, side: Side, output: Path, trust: Sequence[str], recorder: Recorder
) -> dict[str, Any]:
    """Runs `finetune` on the job's config and returns what the recorder cannot know."""
    import automodel.engine.run
    from automodel.plan.check import load_run_config

    recorder.mark("imports_s")
    overrides = [*side.overrides, f"checkpoint.checkpoint_dir={output}"]
    cfg = load_run_config([job / "run.yaml"], overrides, trust)
    seen: dict[str, Any] = {}
    engine: Any = automodel.engine.run
    train = engine.train

    def watched_train(run: Any) -> Any:
        plan = run.prepared.plan
        run.step = WatchedStep(run.step, recorder, plan)
        watch, load = GpuWatch(plan.device), LoadWatch()
        load.start()
        recorder.mark("loop_start_s")
        watch.start()
        outcome = train(run)
        recorder.finish()
        recorder.mark("loop_end_s")
        seen.update(watch.stop() | load.stop())
        seen["precision"] = plan.precision
        seen["setup"] = described(plan)
        seen["validation"] = dict(outcome.validation.values) if outcome.validation else None
        return outcome

    engine.train = watched_train
    try:
        engine.finetune(cfg, overwrite=True, trust=trust)
    finally:
        engine.train = train
    recorder.mark("end_s")
    return {**seen, "end_s": recorder.marks["end_s"], **peak_memory(recorder.device)}


def described(plan: Any) -> str:
    """The plan in a few words, for the table."""
    words = [plan.precision, plan.path]
    if plan.capture:
        words.append("captured step")
    if plan.compile:
        words.append("compiled")
    return ", ".join(words)
