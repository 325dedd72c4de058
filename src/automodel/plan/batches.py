"""How the data of a run is cut into optimizer steps, and how many of them there are.

A step counts examples, or, where bins are filled up to a size, bins; epochs of the latter differ by a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from automodel.config.errors import UserError
from automodel.plan.asked import decide_batch
from automodel.plan.bins import decide_bins
from automodel.plan.config import RunConfig
from automodel.plan.facts import DataFacts
from automodel.plan.plan import Decision

DEFAULT_EPOCHS = 3


class Batches(NamedTuple):
    """How the data is cut into steps, under the names that `Plan` explains."""

    micro_batch_size: int
    grad_acc_steps: int
    global_batch_size: int
    steps_per_epoch: int
    total_steps: int
    num_epochs: float


def cut_into_steps(cfg: RunConfig, data: DataFacts, ranks: int, lines: list[Decision]) -> tuple[Batches, float]:
    """The batches, and the tokens of a micro-batch on average."""
    micro, accumulation = decide_batch(cfg, lines, ranks)
    examples = micro * accumulation * ranks
    mean_tokens = micro * data.tokens / max(1, data.rows)
    bins = decide_bins(cfg, data, accumulation * ranks, lines)
    if bins is None:
        steps_per_epoch, total, epochs = _steps(cfg, _equal_epochs(cfg, data.rows, examples), lines)
    else:
        steps_per_epoch, total, epochs = _steps(cfg, bins.steps_in, lines)
        micro, examples = bins.most_documents, round(bins.packing(0).mean_documents * accumulation * ranks)
        mean_tokens = bins.size * bins.packing(0).fill(bins.lengths, bins.size)
    return Batches(micro, accumulation, examples, steps_per_epoch, total, epochs), mean_tokens


def tokens_of_micro_batch(cfg: RunConfig, data: DataFacts, ranks: int) -> float:
    """On average, told without packing a bin: those are taken as full."""
    micro, _ = decide_batch(cfg, [], ranks)
    return cfg.packed_sequence.packed_sequence_size or micro * data.tokens / max(1, data.rows)


def _equal_epochs(cfg: RunConfig, rows: int, global_batch: int) -> Callable[[int], int]:
    """Steps of an epoch where a step counts examples."""
    steps_per_epoch = rows // global_batch if cfg.dataloader.drop_last else math.ceil(rows / global_batch)
    if steps_per_epoch == 0:
        raise UserError(
            f"dataloader.drop_last drops everything: {rows} examples do not fill one batch of {global_batch}. "
            "Set drop_last: false or use a smaller batch."
        )
    return lambda _epoch: steps_per_epoch


def _steps(cfg: RunConfig, steps_in: Callable[[int], int], lines: list[Decision]) -> tuple[int, int, float]:
    """Steps of the first epoch, of the run, and how many epochs that makes. Epochs packed by size differ a little."""
    schedule = cfg.step_scheduler
    if schedule.max_steps is not None and schedule.num_epochs is None:
        total = schedule.max_steps
        reason = f"max_steps; an epoch is {steps_in(0)}"
    else:
        count = schedule.num_epochs or DEFAULT_EPOCHS
        steps = [steps_in(epoch) for epoch in range(count)]
        total, reason = sum(steps), _epochs(steps)
        if schedule.max_steps is not None:
            total = min(schedule.max_steps, total)
            reason = f"the smaller of max_steps {schedule.max_steps} and {reason}"
    lines.append(Decision("steps", total, reason))
    return steps_in(0), total, _epochs_of(total, steps_in)


def _epochs(steps: list[int]) -> str:
    each = str(steps[0]) if len(set(steps)) == 1 else f"{min(steps)} to {max(steps)}"
    return f"{len(steps)} epoch{'s' if len(steps) != 1 else ''} of {each}"


def _epochs_of(total: int, steps_in: Callable[[int], int]) -> float:
    """How many epochs so many steps are."""
    epoch = 0
    while total > steps_in(epoch):
        total -= steps_in(epoch)
        epoch += 1
    return epoch + total / steps_in(epoch)
