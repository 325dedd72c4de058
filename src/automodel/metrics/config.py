"""The sections of the trackers: `wandb:`, `mlflow:`, `tensorboard:`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from automodel.config.section import PathText, Section


@dataclass(frozen=True, kw_only=True)
class WandbConfig(Section):
    """`wandb:` Weights & Biases; without a login it records offline, and says so."""

    project: str = "automodel"
    """Project name."""
    name: str | None = None
    """Run name."""
    tags: tuple[str, ...] = ()
    """Tags."""
    entity: str | None = None
    """Team or user."""
    group: str | None = None
    """Group of runs."""
    notes: str | None = None
    """Free text."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """Default: online where a login is found, offline otherwise."""
    dir: PathText | None = None
    """Where offline data goes; default the run folder."""


@dataclass(frozen=True, kw_only=True)
class MlflowConfig(Section):
    """`mlflow:` MLflow tracking; default is a local store in the run folder."""

    ALIASES: ClassVar[dict[str, str]] = {"experiment": "experiment_name"}

    experiment_name: str = "automodel"
    """Experiment name."""
    run_name: str | None = None
    """Run name."""
    tracking_uri: str | None = None
    """Server or local path; default `run/mlruns`."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags of the run."""


@dataclass(frozen=True, kw_only=True)
class TensorboardConfig(Section):
    """`tensorboard:` event files."""

    enabled: bool = True
    """Write event files."""
    log_dir: PathText | None = None
    """Where to; default `run/tensorboard`."""
