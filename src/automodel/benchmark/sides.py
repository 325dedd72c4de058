"""Who is compared: the sides of a benchmark as values.

A side is either this library (with config keys overridden, for the ladder) or `transformers.Trainer` with a few
settings. Two Trainer sides matter and they are kept apart on purpose: `hf-trainer` is what the reference's own script
does (fp32, every text padded to `max_length`), and `hf-trainer-tuned` is the best a careful user gets from Trainer
without writing a training loop: which attention is fastest here, and on a processor whether bf16 is faster than fp32,
is found by trying (`trial.py`). A speed-up over the first is what people feel; a speed-up over the second is what this
library adds.

Nothing here imports torch: the processes that are timed read this module first.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from automodel.config.errors import UserError

OURS = "automodel"


@dataclass(frozen=True)
class Tried:
    """A precision and an attention that Trainer was tried with."""

    precision: str
    attention: str
    """transformers' name: `eager`, `sdpa`, `flash_attention_2`."""
    ms: float
    """Forward and backward over the batches of the trial, in the fastest of its rounds."""


@dataclass(frozen=True)
class TrainerSettings:
    """How Trainer is set up; everything else (data, weights, schedule, batch, loss) is the run's own."""

    padding: Literal["max_length", "longest"] = "longest"
    """`max_length` pads every text when it is tokenised, as the reference's script does."""
    same_precision: bool = True
    """Compute in the precision this library plans for the run, where no trial chose another; False leaves Trainer's
    default, fp32."""
    group_by_length: bool = True
    """Batches of similar lengths, where the run shuffles. Without, rows come in the run's own order."""
    fused_adamw: bool = True
    """Ask for the fused AdamW; False leaves Trainer's default (which is fused from torch 2.8 on)."""
    workers: bool = True
    """Collate in worker processes on a GPU machine. On the CPU they would only take cores from the model."""
    cudnn_attention: bool = False
    """Leave cuDNN's attention on. It builds a plan of ~100 ms for every new shape, so dynamic padding wants it off."""
    compile: bool = False
    """`torch_compile=True`."""
    trial: bool = True
    """Try before the run which attention is fastest, and on a processor whose precision the config leaves open, which
    precision. False leaves the attention to transformers."""
    tried: tuple[Tried, ...] = ()
    """What the trial found, the fastest first; empty before the trial, and where there was none."""

    @property
    def chosen(self) -> Tried | None:
        """What the trial chose."""
        return self.tried[0] if self.tried else None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TrainerSettings:
        settings: dict[str, Any] = {**value, "tried": tuple(Tried(**tried) for tried in value["tried"])}
        return cls(**settings)


@dataclass(frozen=True)
class Side:
    """One participant: this library or Trainer, and how it is set up."""

    name: str
    """Short and unique; a column of the table, a file name of the logs."""
    label: str
    """What a person reads."""
    trainer: TrainerSettings | None = None
    """None: this library."""
    overrides: tuple[str, ...] = field(default=())
    """This library: config keys to set, as `section.key=value`."""

    @property
    def ours(self) -> bool:
        return self.trainer is None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Side:
        trainer = TrainerSettings.from_json(value["trainer"]) if value["trainer"] is not None else None
        return cls(value["name"], value["label"], trainer, tuple(value["overrides"]))


STOCK = TrainerSettings(
    padding="max_length",
    same_precision=False,
    group_by_length=False,
    fused_adamw=False,
    workers=False,
    cudnn_attention=True,
    trial=False,
)
TUNED = TrainerSettings()

AUTOMODEL = Side(OURS, "automodel")
TRAINERS = {
    "hf-trainer": Side("hf-trainer", "HF Trainer", STOCK),
    "hf-trainer-tuned": Side("hf-trainer-tuned", "HF Trainer, tuned", TUNED),
    # It reads the rows in our order, so that a median step is a mean one, and losses can be laid over each other.
    "hf-trainer-ungrouped": Side(
        "hf-trainer-ungrouped", "HF Trainer, tuned, not grouped", dataclasses.replace(TUNED, group_by_length=False)
    ),
    "hf-trainer-compile": Side(
        "hf-trainer-compile", "HF Trainer, tuned + torch.compile", dataclasses.replace(TUNED, compile=True)
    ),
}


def sides_against(names: list[str]) -> list[Side]:
    """The opponents by name, in the order given. The first one is the baseline."""
    if not names:
        raise UserError(f"--against names no opponent. Choose from {', '.join(TRAINERS)}.")
    for name in names:
        if name not in TRAINERS:
            raise UserError(f"--against: there is no opponent `{name}`. Choose from {', '.join(TRAINERS)}.")
    if len(set(names)) < len(names):
        raise UserError(f"--against: {', '.join(names)} names an opponent twice.")
    return [TRAINERS[name] for name in names]
