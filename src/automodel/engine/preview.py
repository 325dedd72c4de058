"""What `automodel data preview` shows, as a value: the real data of a config, with the batches it will be cut into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from automodel.config.errors import UserError
from automodel.config.written import as_written
from automodel.data.bins import BinOrder
from automodel.data.inheritance import members_of
from automodel.data.loader import Order
from automodel.data.order import StepOrder
from automodel.data.preview import ShownSample, length_summary, padding_share, shown_sample
from automodel.data.stats import DataStats
from automodel.engine.read_data import RunData, read_data
from automodel.models.families import packing_support
from automodel.plan.asked import decide_batch
from automodel.plan.bins import no_packing
from automodel.plan.config import RunConfig
from automodel.tasks.task import Task


@dataclass(frozen=True)
class Batches:
    """How the training data is cut into batches, and what padding would have cost."""

    path: Literal["packed", "padded"]
    examples: int
    """Examples of a micro-batch; the mean, where bins are filled by size."""
    accumulation: int
    steps: int
    """Optimizer steps of an epoch (of the first one, where they differ)."""
    samples: int
    """Samples of an epoch."""
    padding: float
    """Share of padding if these very batches were padded to their longest sample."""
    grouped_padding: float | None
    """The same for batches of similar lengths, which is what models that cannot pack get."""
    bin_tokens: int = 0
    """Tokens of a micro-batch, where they are packed by size."""
    bins: int = 0
    """Bins of an epoch."""
    fill: float = 1.0
    """How full they are."""


@dataclass(frozen=True)
class Preview:
    """Everything there is to see of one part of the data."""

    split: str
    source: str
    task: Task
    columns: str
    stats: DataStats
    lengths: dict[str, float]
    notes: tuple[str, ...]
    end_token: str | None
    mixture: str
    batches: Batches | None
    shown: tuple[ShownSample, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "source": self.source,
            "task": self.task.name,
            "columns": self.columns,
            "lengths": self.lengths,
            "end_token": self.end_token,
            "stats": self.stats.to_json(),
            "supervised_share": self.stats.supervised_share if self.stats.supervised is not None else None,
            "truncated_share": self.stats.truncated / max(1, self.stats.used),
            "truncated_targets_share": self.stats.truncated_targets / max(1, self.stats.used),
            "rows_whose_end_is_not_learned": self.stats.unended if self.stats.ended is not None else None,
            "mixture": self.mixture or None,
            "notes": list(self.notes),
            "batches": asdict(self.batches) if self.batches else None,
            "samples": [sample.to_json() for sample in self.shown],
        }


def preview(cfg: RunConfig, *, split: str = "train", samples: int = 3, trust: Sequence[str] = ()) -> Preview:
    """Reads and tokenises the data of a config exactly as a run would; loads no weights."""
    if split == "validation" and cfg.validation_dataset is None:
        raise UserError("--split validation: the config has no validation_dataset. Add one, or look at --split train.")
    run = read_data(cfg, trust)
    section = cfg.dataset if split == "train" else cfg.validation_dataset
    data = run.train if split == "train" else run.validation
    assert data is not None
    assert section is not None
    order = _order(cfg, run) if split == "train" else None
    if order is None:
        chosen = np.arange(len(data.store))
    else:
        chosen = np.concatenate(order.micro_batches(0, 0))
        if len(chosen) < samples:
            chosen = np.concatenate([b for step in range(order.steps_in(0)) for b in order.micro_batches(0, step)])
    place = section if section.path or section.target or section.mixture else cfg.dataset
    return Preview(
        split=split,
        source=as_written(", ".join(str(member.path or member.target) for _, member in members_of(place))),
        task=run.task,
        columns=data.description,
        stats=data.stats,
        lengths=length_summary(data.store.lengths),
        notes=tuple(map(as_written, data.notes)),
        end_token=run.tokenizer.eos_token,
        mixture=data.mixture.in_words() if data.mixture and split == "train" else "",
        batches=_batches(cfg, run, order) if order is not None else None,
        shown=tuple(shown_sample(data, run.tokenizer, int(index)) for index in chosen[:samples]),
    )


def _order(cfg: RunConfig, run: RunData) -> Order:
    """The order of the run's steps, as its loader has it."""
    data, shuffle = run.train, cfg.dataloader.shuffle is not False
    micro, accumulation = decide_batch(cfg, [])
    lengths, seed, drop_last = data.store.lengths, cfg.seed, cfg.dataloader.drop_last
    size = cfg.packed_sequence.packed_sequence_size
    if size:
        support = packing_support(run.hf_config, run.task.head, run.longest)
        if not support.packed:
            raise no_packing(run.hf_config.model_type, support.reason, cfg)
        return BinOrder(lengths, size, accumulation, seed, shuffle, drop_last, data.mixture)
    pads = _path(cfg, run) == "padded"
    grouped = pads and shuffle and cfg.dataloader.group_by_length is not False
    return StepOrder(lengths, micro, accumulation, seed, shuffle, drop_last, grouped, pads, data.mixture)


def _path(cfg: RunConfig, run: RunData) -> Literal["packed", "padded"]:
    possible = (
        packing_support(run.hf_config, run.task.head, run.longest).packed and cfg.packed_sequence.enabled is not False
    )
    return "packed" if possible else "padded"


def _batches(cfg: RunConfig, run: RunData, order: Order) -> Batches:
    lengths = run.train.store.lengths
    if isinstance(order, BinOrder):
        packing = order.packing(0)
        return Batches(
            path="packed",
            examples=round(packing.mean_documents),
            accumulation=order.bins_per_step,
            steps=order.steps_per_epoch,
            samples=len(packing.samples),
            padding=padding_share(lengths, _micro_batches(order)),
            grouped_padding=None,
            bin_tokens=order.size,
            bins=len(packing),
            fill=packing.fill(lengths, order.size),
        )
    random = StepOrder(
        lengths, order.micro_batch_size, order.grad_acc_steps, order.seed, order.shuffle, mixture=order.mixture
    )
    grouped = StepOrder(
        lengths, order.micro_batch_size, order.grad_acc_steps, order.seed, order.shuffle, group_by_length=True,
        sort_within_step=True, mixture=order.mixture,
    )  # fmt: skip
    return Batches(
        path=_path(cfg, run),
        examples=order.micro_batch_size,
        accumulation=order.grad_acc_steps,
        steps=order.steps_per_epoch,
        samples=order.samples_per_epoch,
        padding=padding_share(lengths, _micro_batches(random)),
        grouped_padding=padding_share(lengths, _micro_batches(grouped)),
    )


def _micro_batches(order: Order) -> Iterator[np.ndarray]:
    for step in range(order.steps_in(0)):
        yield from order.micro_batches(0, step)
