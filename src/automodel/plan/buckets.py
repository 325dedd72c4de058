"""How far token counts are rounded up, so that shapes repeat and a recorded step can be replayed.

Coarse buckets cost dummy tokens in every step, fine ones a recording for every shape. How many shapes there will be is
tried out: some of the run's samples are thrown together into batches. The two numbers of a batch, its tokens and the
positions that the head reads, make a shape together, and where they vary by themselves (answers of all lengths) there
are several times as many shapes as of tokens alone; so the second is rounded further than the first where that pays.

A recording takes the host some milliseconds a layer. The steps before it go on meanwhile, so where a step takes longer
than that, it costs next to nothing, and what is left to save is dummy tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from automodel.data.collate import read_slots, rounded_up
from automodel.data.sizes import Sizes
from automodel.distributed.layout import Layout
from automodel.plan.batches import Batches
from automodel.plan.config import RunConfig
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.fitting import may_be_captured
from automodel.plan.plan import Decision

if TYPE_CHECKING:
    from automodel.plan.hardware import Hardware  # which imports torch

SMALLEST_BUCKET, LARGEST_BUCKET = 32, 2048
FEWEST_PARTS = 4  # of a mean batch: coarser buckets are more than an eighth of dummy tokens
READS = (1, 2, 4, 8)  # times a bucket, that read positions are rounded up to
BIN_READS = 16  # parts of a bin, which has one size but not one number of labels
MOST_SHAPES = 96  # among the batches that are tried out; some of a long run are yet others
MOST_TRIED = 1024  # batches
MOST_DRAWN = 2_000_000  # samples for them

FLOPS = 400e12  # of a GPU in a second; a slower one gets coarser buckets than would be best
RECORDING_S, RECORDING_LAYER_S = 0.016, 0.0046  # H200's host: 44 ms for the 6 layers of DistilBERT, 90 for Llama's 16
HIDDEN_S = 0.005  # of a recording that other steps hide, and for the memory that a graph takes
DUMMY = 0.5
"""What a dummy token costs of a real one: the update does not grow with it, and equal numbers take less power. Llama 1B
with 8 SQuAD documents: 22.0 ms at 1 % of dummy tokens, 22.85 at 9 %; 16k tokens: 207.5 ms at 0.4 %, 210.5 at 5 %."""
SPREAD = 0.5  # deviation of the logarithm of lengths, where nobody has counted them


@dataclass(frozen=True)
class Rounding:
    """What token counts and read positions are rounded up to multiples of."""

    tokens: int
    reads: int
    """0: as tokens."""
    read: float | None = None
    """Share of all positions that the head computes, filled up as they are; none: not known."""


EXACT = Rounding(1, 0)


@dataclass(frozen=True)
class Tried:
    """What a rounding would come to."""

    rounding: Rounding
    shapes: int
    dummy: float
    """Share of the tokens."""
    seconds: float
    """Of the run."""

    @property
    def reads_in_words(self) -> str:
        return f"read positions to {self.rounding.reads}" if self.rounding.reads > self.rounding.tokens else ""


def decide_rounding(
    cfg: RunConfig,
    path: str,
    hardware: Hardware,
    model: ModelFacts,
    data: DataFacts,
    cut: Batches,
    layout: Layout,
    lines: list[Decision],
) -> Rounding:
    """For the micro-batches of a run. Where a new shape costs no recording, there is no reason to fill up what the head
    reads further than tokens are."""
    asked, size = cfg.packed_sequence.bucket_tokens, cfg.packed_sequence.packed_sequence_size
    if path != "packed":
        return EXACT
    if hardware.device == "cpu" and asked is None:
        lines.append(
            Decision("buckets", "off", "token counts are not rounded up: on the CPU a new shape costs nothing")
        )
        return EXACT
    if size:
        lines.append(Decision("buckets", size, "every bin is filled up to its size with dummy tokens: one shape"))
        return Rounding(size, size // BIN_READS)
    recorded, count = may_be_captured(cfg, path, hardware, layout), cut.total_steps * cut.grad_acc_steps
    tried = list(_tried(model, data, cut.micro_batch_size, count, asked, recorded))
    few = [t for t in tried if t.shapes <= MOST_SHAPES]
    best = min(few, key=lambda t: t.seconds) if few else min(tried, key=lambda t: t.shapes)
    further = f"; {best.reads_in_words}" if best.reads_in_words else ""
    if asked is not None:
        lines.append(Decision("buckets", asked, f"packed_sequence.bucket_tokens asks for it{further}"))
        return best.rounding
    costs = "would cost more captures than they save" if recorded else "would make more shapes"
    reason = f"shapes repeat at about {best.dummy:.1%} dummy tokens{further}; finer ones {costs}"
    lines.append(Decision("buckets", best.rounding.tokens, reason))
    return best.rounding


def _tried(
    model: ModelFacts, data: DataFacts, micro_batch: int, count: int, asked: int | None = None, recorded: bool = True
) -> Iterator[Tried]:
    """From coarse to fine."""
    sizes = _guessed(data) if data.sizes is None else data.sizes()
    batches = sizes.batches(max(1, min(count, MOST_TRIED, MOST_DRAWN // micro_batch)), micro_batch)
    mean = float(batches.tokens.mean())
    block, head = costs(model)
    step_s = block * mean + head * float(np.mean(batches.reads if batches.reads is not None else 0))
    layers = model.shape.layers if model.shape is not None else 12
    recording_s = max(HIDDEN_S, RECORDING_S + RECORDING_LAYER_S * layers - step_s)
    for tokens in [asked] if asked is not None else _buckets(mean):
        total = rounded_up(batches.tokens, tokens)
        for times in READS if recorded and batches.reads is not None else READS[:1]:
            reads, extra, share = np.zeros_like(total), 0.0, None
            if batches.reads is not None:
                reads = read_slots(batches.reads, micro_batch, total, tokens * times)
                extra, share = float((reads - batches.reads).mean()), float(reads.sum() / total.sum())
            shapes = len(np.unique(total.astype(np.int64) << 32 | reads))
            dummies = float(total.mean()) - mean
            seconds = shapes * recording_s + count * (DUMMY * block * dummies + head * extra)
            yield Tried(Rounding(tokens, tokens * times, share), shapes, dummies / mean, seconds)


def _buckets(mean_tokens: float) -> Iterator[int]:
    coarsest = 2 ** round(math.log2(max(1.0, mean_tokens / FEWEST_PARTS)))
    bucket = min(max(coarsest, SMALLEST_BUCKET), LARGEST_BUCKET)
    while bucket >= SMALLEST_BUCKET:
        yield bucket
        bucket //= 2


def costs(model: ModelFacts) -> tuple[float, float]:
    """Seconds of a token in the blocks, and of a read position in the head of a language model and, where only those go
    through it, in the last block."""
    flops = (4 if model.trained else 6) / FLOPS  # a frozen weight has no gradient
    if model.shape is None:
        return flops * model.parameters, 0.0
    words, head = model.shape.vocabulary * model.shape.width, model.head_words * model.shape.width
    tables = words if model.shape.tied else words + head
    blocks = max(1, model.parameters - tables)
    return flops * blocks, flops * (head + (blocks / model.shape.layers if model.read_saving else 0))


def _guessed(data: DataFacts) -> Sizes:
    """Lengths of samples that nobody has counted."""
    if data.lengths is not None:
        return Sizes(data.lengths)
    drawn = np.exp(SPREAD * np.random.default_rng(0).standard_normal(1000))
    return Sizes(np.maximum(1, (drawn / drawn.mean() * data.tokens / max(1, data.rows)).astype(np.int64)))
