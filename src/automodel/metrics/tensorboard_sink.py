"""TensorBoard event files, under `run/tensorboard` unless said otherwise.

Scalars are named `train/loss`, `validation/accuracy`, …, so that the same metric of both splits stands side by side.
A resumed run purges the events past its checkpoint, as `metrics.jsonl` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel.metrics.config import TensorboardConfig

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorboardTracker:
    """Writes event files."""

    name = "tensorboard"

    def __init__(self, config: TensorboardConfig, resume_step: int | None = None):
        self.config = config
        self.resume_step = resume_step
        self._writer: SummaryWriter | None = None

    def start(self, run_dir: Path, config: dict[str, Any], plan: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        log_dir = self.config.log_dir or str(Path(run_dir) / "tensorboard")
        purge_step = None if self.resume_step is None else self.resume_step + 1
        self._writer = SummaryWriter(log_dir, purge_step=purge_step, flush_secs=10)
        if self.resume_step is None:
            self._writer.add_text("config", _as_markdown(config))
            self._writer.add_text("plan", _as_markdown(plan))

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        if self._writer is None:
            raise RuntimeError("log() before start()")
        for name, value in values.items():
            self._writer.add_scalar(f"{split}/{name}", float(value), step)

    def finish(self, summary: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.add_text("summary", _as_markdown(summary))
            self._writer.close()
            self._writer = None


def _as_markdown(value: dict[str, Any]) -> str:
    """Indented by four: TensorBoard renders it as a code block."""
    text = json.dumps(value, indent=2, default=str)
    return "\n".join("    " + line for line in text.splitlines())
