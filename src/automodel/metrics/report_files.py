"""The files of a run folder, as the report reads them.

Each file may be missing (an interrupted run has no `summary.json`) or damaged; `RunFiles.missing` says which and why,
in the words the section then shows.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.metrics.jsonl import read_metrics


@dataclass
class RunFiles:
    """What could be read."""

    config: str | None = None
    plan: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    """File name to what is wrong with it."""
    as_of: str | None = None
    """When these files were read, of a run that goes on; none: it has ended."""

    def missing(self, name: str) -> str:
        """Why a section has nothing to show."""
        return self.problems.get(name) or f"{name} holds nothing to show here."

    def lines(self, split: str) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line.get("split") == split]

    def points(self, split: str, name: str) -> list[tuple[float, float]]:
        """(step, value) of a metric; NaN and infinities included."""
        values = ((line["step"], line.get(name)) for line in self.lines(split))
        return [(float(step), float(value)) for step, value in values if isinstance(value, int | float)]

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.metrics), default=0)

    def name_of(self, section: str, *keys: str) -> str | None:
        """A name from the summary, or from the config where the run left no summary."""
        if (self.summary or {}).get(section):
            return str((self.summary or {})[section])
        import yaml

        from automodel.config.yaml_text import parse_yaml

        try:
            value = (parse_yaml(self.config or "") or {}).get(section)
        except (yaml.YAMLError, AttributeError):
            return None
        if isinstance(value, dict):
            value = next((value[k] for k in keys if value.get(k)), None)
        return str(value) if value else None

    @property
    def best_step(self) -> int | None:
        best = (self.summary or {}).get("best")
        return best.get("step") if isinstance(best, dict) else None


def run_folder(folder: Path) -> Path:
    """The `run/` folder itself, given it or the folder above it."""
    folder = Path(folder)
    is_run = (folder / "metrics.jsonl").exists() or (folder / "config.yaml").exists()
    return folder / "run" if not is_run and (folder / "run").is_dir() else folder


def read_run(run_dir: Path, running: bool = False) -> RunFiles:
    """Read a `run/` folder, or the folder above it. `running`: the run goes on, and a summary is that of an earlier
    part of it."""
    folder = run_folder(run_dir)
    run = RunFiles()
    if running:
        run.as_of = time.strftime("%Y-%m-%d %H:%M:%S")
    for name in ("plan", "data", "summary"):
        setattr(run, name, _read_object(folder / f"{name}.json", run.problems))
    if running:
        run.summary = None
        run.problems["summary.json"] = "The run goes on; this comes when it ends."
    try:
        run.config = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        run.problems["config.yaml"] = "config.yaml is missing."
    try:
        run.metrics = read_metrics(folder / "metrics.jsonl")
    except UserError as error:
        run.problems["metrics.jsonl"] = f"metrics.jsonl could not be read: {error}"
    if not (folder / "metrics.jsonl").exists():
        run.problems["metrics.jsonl"] = "metrics.jsonl is missing."
    elif not run.metrics and "metrics.jsonl" not in run.problems:
        run.problems["metrics.jsonl"] = "metrics.jsonl is empty: the run ended before its first log step."
    return run


def _read_object(path: Path, problems: dict[str, str]) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems[path.name] = f"{path.name} is missing."
        return None
    except (OSError, ValueError) as error:
        problems[path.name] = f"{path.name} could not be read: {error}"
        return None
    if not isinstance(value, dict):
        problems[path.name] = f"{path.name} could not be read: it is not an object."
        return None
    return value
