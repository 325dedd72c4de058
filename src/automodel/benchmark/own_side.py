"""This library as a side: `finetune` itself, watched step by step.

What runs is exactly what `automodel finetune llm` runs: the config is loaded, planned, trained, evaluated and saved by
the engine. An observer tells the recorder when steps begin and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from automodel.benchmark.machine import GpuWatch, LoadWatch, peak_memory
from automodel.benchmark.recorder import Recorder
from automodel.benchmark.sides import Side
from automodel.engine.observe import Observer
from automodel.engine.step import StepResult
from automodel.metrics.compute import EvalMetrics
from automodel.plan.plan import Plan


class StepWatch(Observer):
    """Hands what the loop tells to the recorder, and reads the machine while the loop runs."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.seen: dict[str, Any] = {}

    def model_loaded(self) -> None:
        if "loop_start_s" not in self.recorder.marks:  # what is tried before the first step is part of training
            self.recorder.mark("loop_start_s")

    def loop_begins(self, plan: Plan) -> None:
        self.seen = {
            "precision": plan.precision,
            "attention": "packed" if plan.path == "packed" else "transformers' choice",
            "setup": described(plan),
        }
        self.gpu, self.load = GpuWatch(plan.device), LoadWatch()
        self.load.start()
        self.gpu.start()

    def step_begins(self) -> None:
        self.recorder.begin()

    def step_ends(self, result: StepResult, pauses: bool) -> None:
        self.recorder.count(result.tokens, result.samples)
        self.recorder.end(result.loss, pause=pauses)

    def loop_ends(self, validation: EvalMetrics | None) -> None:
        self.recorder.finish()
        self.recorder.mark("loop_end_s")
        self.seen |= self.gpu.stop() | self.load.stop()
        self.seen["threads"] = torch.get_num_threads()
        self.seen["validation"] = dict(validation.values) if validation else None


def train_with_automodel(
    job: Path, side: Side, output: Path, trust: Sequence[str], recorder: Recorder
) -> dict[str, Any]:
    """Runs `finetune` on the job's config and returns what the recorder cannot know."""
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    recorder.mark("imports_s")
    overrides = [*side.overrides, f"checkpoint.checkpoint_dir={output}"]
    cfg = load_run_config([job / "run.yaml"], overrides, trust)
    watch = StepWatch(recorder)
    finetune(cfg, overwrite=True, trust=trust, observer=watch)
    recorder.mark("end_s")
    return {**watch.seen, "end_s": recorder.marks["end_s"], **peak_memory(recorder.device)}


def described(plan: Plan) -> str:
    """The plan in a few words, for the table."""
    words = [plan.precision, plan.path]
    if plan.capture:
        words.append("captured step")
    if plan.compile:
        words.append("compiled")
    return ", ".join(words)
