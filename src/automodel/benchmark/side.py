"""One side of a comparison, in a process of its own: `python -m automodel.benchmark.side REQUEST RESULT`.

The request names the job folder (job.py), the side (sides.py) and a folder to write into; the result is a JSON object
of everything measured. The parent puts the moment before the start into the environment, so that interpreter start-up
and imports count.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel.benchmark.recorder import Recorder
from automodel.benchmark.sides import Side

STARTED = "AUTOMODEL_BENCHMARK_STARTED"


@dataclass(frozen=True)
class Request:
    """What a side's process is asked to do."""

    job: Path
    side: Side
    output: Path
    trust: tuple[str, ...]

    def write(self, path: Path) -> None:
        value = {
            "job": str(self.job),
            "side": self.side.to_json(),
            "output": str(self.output),
            "trust": list(self.trust),
        }
        path.write_text(json.dumps(value, indent=2), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Request:
        value = json.loads(path.read_text(encoding="utf-8"))
        return cls(Path(value["job"]), Side.from_json(value["side"]), Path(value["output"]), tuple(value["trust"]))


def run_side(request: Request, started: float) -> dict[str, Any]:
    """Trains once and returns what was measured. Imports of the sides are late: they are part of their time."""
    settings = json.loads((request.job / "job.json").read_text(encoding="utf-8"))
    recorder = Recorder(settings["device"], settings["warmup_steps"], started)
    if request.side.ours:
        from automodel.engine.gpu_context import open_gpu_context
        from automodel.models.lean_imports import import_transformers
        from automodel.plan.check import load_run_config
        from automodel.plan.kernels_ahead import compile_kernels_ahead

        # As `automodel finetune` does, before anything heavy is imported.
        open_gpu_context()
        compile_kernels_ahead(load_run_config([request.job / "run.yaml"], request.side.overrides, request.trust))
        import_transformers()
        from automodel.benchmark.own_side import train_with_automodel

        measured = train_with_automodel(request.job, request.side, request.output, request.trust, recorder)
    else:
        from automodel.benchmark.trainer_side import train_with_trainer

        assert request.side.trainer is not None
        measured = train_with_trainer(settings, request.side.trainer, request.output, recorder)
    numbers = recorder.numbers(settings["steps_per_epoch"])
    return {
        "provider": request.side.name,
        "method": request.side.label,
        "status": "completed",
        **numbers,
        "training_time": measured["end_s"] - numbers["loop_start_s"],
        **measured,
    }


def main() -> None:
    started = float(os.environ.get(STARTED) or time.monotonic())
    request, result = Path(sys.argv[1]), Path(sys.argv[2])
    measured = run_side(Request.read(request), started)
    temporary = result.with_suffix(".tmp")
    temporary.write_text(json.dumps(measured), encoding="utf-8")
    os.replace(temporary, result)
    if Request.read(request).side.ours:
        from automodel.engine.leave import leave

        leave(0)  # as the command does


if __name__ == "__main__":
    main()
