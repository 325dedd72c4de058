"""Where the numbers of a run go.

A `Tracker` is a sink: `metrics.jsonl` and `report.html` always, TensorBoard, Weights & Biases and MLflow where they are
configured. The engine talks to one `Trackers`, which passes everything on and keeps one promise: a sink that breaks
while the run is under way (network down, disk full, server gone) is reported once and left out from then on; it never
ends the run. What can be known before training, above all a missing package, is a `UserError` while the trackers are
built.

Sinks are imported when they are built: together they take seconds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from automodel.config.errors import UserError
from automodel.metrics.config import MlflowConfig, TensorboardConfig, WandbConfig
from automodel.metrics.jsonl import JsonlTracker, read_metrics
from automodel.metrics.live_report import LiveReport

__all__ = ["JsonlTracker", "Say", "Tracker", "Trackers", "build_trackers", "read_metrics"]

Say = Callable[[str], None]


class Tracker(Protocol):
    """A sink for metrics."""

    name: str
    """The section that configures it, for messages."""

    def start(self, run_dir: Path, config: dict[str, Any], plan: dict[str, Any]) -> None:
        """The run begins or goes on; `run_dir` is the `run/` folder."""
        ...

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        """Values of one step, `split` being `train` or `validation`."""
        ...

    def finish(self, summary: dict[str, Any]) -> None:
        """The run ends; `summary` is what `summary.json` holds."""
        ...


class Trackers:
    """Several sinks as one. A sink that fails is reported once and disabled."""

    name = "trackers"

    def __init__(self, sinks: Sequence[Tracker], warn: Say | None = None):
        self.sinks = list(sinks)
        self.warn = warn or _warn_on_stderr

    def start(self, run_dir: Path, config: dict[str, Any], plan: dict[str, Any]) -> None:
        """Start every sink. What the user can put right (a damaged metrics.jsonl) is raised: nothing is trained yet."""
        self._each("start", lambda sink: sink.start(run_dir, config, plan), fatal=UserError)

    def log(self, step: int, values: Mapping[str, float], split: str = "train") -> None:
        self._each("record", lambda sink: sink.log(step, values, split))

    def finish(self, summary: dict[str, Any]) -> None:
        self._each("finish", lambda sink: sink.finish(summary))

    def _each(self, verb: str, call: Callable[[Tracker], None], fatal: type | tuple[()] = ()) -> None:
        for sink in list(self.sinks):
            try:
                call(sink)
            except Exception as error:
                if isinstance(error, fatal):
                    raise
                self.sinks.remove(sink)
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                self.warn(f"{sink.name} could not {verb} and is left out from here on; the run goes on ({reason})")


def build_trackers(
    wandb: WandbConfig | None,
    mlflow: MlflowConfig | None,
    tensorboard: TensorboardConfig | None,
    run_dir: Path,
    resume_step: int | None = None,
    info: Say | None = None,
    warn: Say | None = None,
) -> Trackers:
    """The sinks of a run. `resume_step` is the last step the resumed checkpoint holds, None for a new run.

    `info` and `warn` are where sinks speak (`Progress.info`, `Progress.warn`); standard error where they are left out.
    """
    info = info or _info_on_stderr
    sinks: list[Tracker] = [JsonlTracker(Path(run_dir) / "metrics.jsonl", resume_step), LiveReport()]
    if tensorboard is not None and tensorboard.enabled:
        _require("tensorboard", "tensorboard")
        from automodel.metrics.tensorboard_sink import TensorboardTracker

        sinks.append(TensorboardTracker(tensorboard, resume_step))
    if wandb is not None:
        _require("wandb", "wandb")
        from automodel.metrics.wandb_sink import WandbTracker

        sinks.append(WandbTracker(wandb, resume_step, info))
    if mlflow is not None:
        _require("mlflow", "mlflow")
        from automodel.metrics.mlflow_sink import MlflowTracker

        sinks.append(MlflowTracker(mlflow, resume_step, info))
    return Trackers(sinks, warn)


def _require(package: str, section: str) -> None:
    """The package must be there before hours are spent on training."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{section} is configured but not installed: pip install 'automodel-finetune[{section}]' "
            f"or remove the {section}: section"
        )


def _info_on_stderr(text: str) -> None:
    print(f"[INFO] {text}", file=sys.stderr, flush=True)


def _warn_on_stderr(text: str) -> None:
    print(f"[WARN] {text}", file=sys.stderr, flush=True)
