"""The batches that travel from the loader to the step.

Legend: T tokens of the whole micro-batch (rounded up to a bucket), D document slots, R positions the head reads,
B rows and S columns of a padded batch.

`PackedBatch` is one flat stream of documents, with no padding between them. The head reads hidden states only at
`read_positions_R`, and `labels_R` are aligned with them:

- text classification: the pooled token of each document (its first or its last), with the document's label;
- causal LM: every position whose *next* token carries a label, with that token (the shift is already done);
- token classification: every labelled token.

So one gather serves every task, and the head and the loss run only where there is something to learn.

`PaddedBatch` is the ordinary rectangle, for models whose attention cannot be packed (T5, BART, DeBERTa, …).

`StepBatch` is everything one optimizer step consumes. Its `label_count` is the number of labels over *all* its
micro-batches: losses are summed and divided by it once, so gradient accumulation never becomes a mean of means.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

IGNORE = -100  # label of a position that carries no loss


def _moved(batch, device, non_blocking: bool):
    """A copy of the dataclass with its tensors on `device`."""
    values = {}
    for f in fields(batch):
        value = getattr(batch, f.name)
        values[f.name] = value.to(device, non_blocking=non_blocking) if isinstance(value, Tensor) else value
    return type(batch)(**values)


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch as a flat stream of documents. The tail up to the bucket is made of dummy documents, none
    longer than `max_seqlen`: varlen attention leaves rows past it unwritten, and they turn to NaN."""

    input_ids_T: Tensor
    """int64 token ids."""
    position_ids_T: Tensor
    """int64 positions, starting at 0 in every document (families add their own offset)."""
    cu_seqlens_D: Tensor
    """int32 document boundaries, (D + 1,); unused slots repeat T."""
    max_seqlen: int
    """Upper bound of a document's length; a constant of the run, so that shapes repeat."""
    read_positions_R: Tensor
    """int64 positions whose hidden state the head reads; padded slots point at 0 and carry label IGNORE."""
    labels_R: Tensor
    """Labels aligned with `read_positions_R`: int64 classes, or float32 (R, C) for multi-label and regression."""
    token_type_ids_T: Tensor | None
    """int64 segment ids of text pairs, where the model has them."""
    num_documents: int
    """Real documents."""
    num_tokens: int
    """Real tokens, without the tail."""
    num_labels: int
    """Labels that count in the loss."""
    indices: tuple[int, ...] = ()
    """Row numbers in the dataset, for predictions and error messages."""
    token_runs_2T: Tensor | None = None
    """int32 (2, T), for the embedding's gradient on a GPU: places of the tokens in order of their ids, and, where a run
    of equal ids starts in that order, its length (0 elsewhere)."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        return _moved(self, device, non_blocking)

    def pin_memory(self) -> PackedBatch:
        return type(self)(
            **{f.name: _pinned(getattr(self, f.name)) for f in fields(self)},
        )


@dataclass(frozen=True)
class PaddedBatch:
    """One micro-batch as a rectangle, for models that cannot be packed."""

    input_ids_BS: Tensor
    """int64, right-padded with the pad token (left-padded for generation)."""
    attention_mask_BS: Tensor
    """int64, 1 on real tokens."""
    labels: Tensor
    """(B,) or (B, C) for classification, (B, S) token labels with IGNORE, (B, S_target) for seq2seq. Token labels of a
    causal LM are *already shifted*: column s holds the token that position s predicts."""
    token_type_ids_BS: Tensor | None
    """Segment ids of text pairs, where the model has them."""
    num_documents: int
    num_tokens: int
    num_labels: int
    indices: tuple[int, ...] = ()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PaddedBatch:
        return _moved(self, device, non_blocking)

    def pin_memory(self) -> PaddedBatch:
        return type(self)(**{f.name: _pinned(getattr(self, f.name)) for f in fields(self)})


Batch = PackedBatch | PaddedBatch


def labels_of(batch: Batch) -> Tensor:
    return batch.labels_R if isinstance(batch, PackedBatch) else batch.labels


def _pinned(value):
    return value.pin_memory() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class StepBatch:
    """What one optimizer step consumes."""

    micro_batches: tuple[Batch, ...]
    epoch: int
    """Epoch the step belongs to, from 0."""
    step_in_epoch: int
    """Index of the step in its epoch, from 0."""
    steps_in_epoch: int = 0
    """Steps of that epoch; 0 where nobody counted them."""

    @property
    def epochs_done(self) -> float:
        """Epochs trained once this step is, as a fraction."""
        return self.epoch + (self.step_in_epoch + 1) / max(1, self.steps_in_epoch)

    @property
    def label_count(self) -> int:
        return sum(b.num_labels for b in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        return sum(b.num_tokens for b in self.micro_batches)

    @property
    def num_documents(self) -> int:
        return sum(b.num_documents for b in self.micro_batches)

    def pin_memory(self) -> StepBatch:
        pinned = tuple(b.pin_memory() for b in self.micro_batches)
        return StepBatch(pinned, self.epoch, self.step_in_epoch, self.steps_in_epoch)
