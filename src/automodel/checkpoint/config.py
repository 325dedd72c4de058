"""The `checkpoint:` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from automodel.config.section import Count, NonNegative, PathText, Section


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """`checkpoint:` where the run lives and what is kept."""

    ALIASES: ClassVar[dict[str, str]] = {"output_dir": "checkpoint_dir", "save_total_limit": "keep_last"}

    enabled: bool = True
    """False writes `run/` (config, plan, metrics, report) but neither checkpoints nor the model."""
    checkpoint_dir: PathText = "./checkpoints"
    """The run folder: a plain Hugging Face folder at its root, everything about the run in `run/`."""
    keep_last: Count = 2
    """Resumable checkpoints to keep; the best one is kept beside them."""
    keep_best: bool = True
    """Export the weights of the best evaluation rather than the last ones (needs a validation set)."""
    async_save: bool = True
    """Copy the state and write it while training goes on; false waits for the disk at every save."""
    on_error: Literal["stop", "continue"] = "stop"
    """What a checkpoint that cannot be written means: `stop` ends the run, `continue` says so, keeps the last good one
    and trains on."""
    best_metric: str | None = None
    """Metric that decides; default `loss`. Trainer's and `evaluate`'s names (`eval_f1`, `matthews_correlation`) are
    known."""
    best_mode: Literal["min", "max"] | None = None
    """Whether smaller or larger is better. That is known for every metric here, and the opposite is refused."""


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig(Section):
    """`early_stopping:` stop when the validation metric no longer improves."""

    patience: Count = 3
    """Evaluations without improvement before stopping."""
    min_delta: NonNegative = 0.0
    """How much better than the best one so far an evaluation must be for patience to begin anew. Which weights are the
    best does not depend on it."""
    metric: str | None = None
    """Metric to watch; default `checkpoint.best_metric`."""
