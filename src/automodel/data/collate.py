"""From sample numbers to a batch: slices of the store's flat arrays, joined. No Python loop ever runs over tokens.

`PackedCollator` lays documents end to end. With `bucket_tokens` above 1 the stream is rounded up to a multiple of it
with dummy documents, and every other array has a size that depends only on the bucket, so that shapes repeat and a
step can be captured once for each bucket:

- the tail is cut into documents of at most `max_seqlen` (varlen attention leaves rows beyond it unwritten: NaN);
- `cu_seqlens` has room for `micro_batch_size` documents plus the longest possible tail; unused slots repeat T;
- the positions the head reads are padded: to `micro_batch_size` for a classifier, to a multiple of `bucket_reads` for
  token tasks, or to T where nearly all are read. A padded slot reads position 0 and carries IGNORE (NaN among float
  labels).

`PaddedCollator` makes the ordinary rectangle.

`num_labels` counts what a mean loss divides by: documents for text classification of every kind (a multi-label
document's loss is already a mean over its classes), supervised tokens for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from automodel.data.batch import IGNORE, PackedBatch, PaddedBatch
from automodel.data.row_format import LabelPlace
from automodel.data.store import TokenStore


@dataclass(frozen=True)
class PackedCollator:
    """Makes `PackedBatch`es. Called with the sample numbers of one micro-batch."""

    store: TokenStore
    place: LabelPlace
    pool: Literal["first", "last"] = "first"
    """Which token a classifier of documents reads: the first (BERT) or the last (decoders)."""
    bucket_tokens: int = 1
    """T is rounded up to a multiple of this; 1 adds no tail."""
    max_seqlen: int = 0
    """Longest document of the run; the store's longest where that is larger."""
    micro_batch_size: int = 8
    bucket_reads: int = 0
    """Token tasks: read positions are rounded up to a multiple of this; 0 takes `bucket_tokens`."""
    with_labels: bool = True
    """False leaves the labels out (prediction): the head then reads every position it could be asked about."""

    sort_tokens: bool = False
    """Also give the tokens in order of their ids (`token_runs_2T`)."""
    longest_first: bool = False
    """Long documents at the front of the stream: on a GPU, work that starts first ends first."""

    pads = False  # a step's samples need no sorting: there is no padding to save

    def __post_init__(self):
        longest = int(self.store.lengths.max()) if len(self.store) else 1
        if self.place == "target":
            raise ValueError("batches with targets of their own are padded: use PaddedCollator")
        # Validation data may have a longer limit of its own than the training data the plan was made for.
        object.__setattr__(self, "max_seqlen", max(self.max_seqlen, longest))

    @property
    def document_slots(self) -> int:
        """D: room for the micro-batch and the longest possible tail. Documents of one length leave no tail where a full
        micro-batch fills its bucket, and then there is no slot for one: such a batch is a rectangle."""
        if self.one_length and self.micro_batch_size * self.max_seqlen % self.bucket_tokens == 0:
            return self.micro_batch_size
        return self.micro_batch_size + -(-(self.bucket_tokens - 1) // self.max_seqlen)

    @cached_property
    def one_length(self) -> bool:
        """Whether every document is as long as the longest allowed."""
        return len(self.store) > 0 and int(self.store.lengths.min()) == self.max_seqlen

    def __call__(self, indices: Sequence[int]) -> PackedBatch:
        chosen = np.asarray(indices, dtype=np.int64)
        if self.longest_first:
            chosen = chosen[np.argsort(-self.store.lengths[chosen], kind="stable")]
        if len(chosen) > self.micro_batch_size:
            raise ValueError(f"{len(chosen)} documents for a micro-batch of {self.micro_batch_size}")
        lengths = self.store.lengths[chosen]
        real = int(lengths.sum())
        total = rounded_up(real, self.bucket_tokens)
        tail = _tail_lengths(total - real, self.max_seqlen)
        boundaries = np.concatenate([[0], np.cumsum(np.concatenate([lengths, tail]))])
        cu_seqlens = np.full(self.document_slots + 1, total, dtype=np.int32)
        cu_seqlens[: len(boundaries)] = boundaries
        reads, labels, num_labels = self._reads(chosen, boundaries[: len(chosen) + 1], total)
        token_types = _gathered(self.store.token_types, self.store.offsets, chosen, total)
        input_ids = _gathered(self.store.input_ids, self.store.offsets, chosen, total)
        return PackedBatch(
            input_ids_T=torch.from_numpy(input_ids),
            position_ids_T=torch.from_numpy(_positions(boundaries, total)),
            cu_seqlens_D=torch.from_numpy(cu_seqlens),
            max_seqlen=self.max_seqlen,
            read_positions_R=torch.from_numpy(reads),
            labels_R=torch.from_numpy(labels),
            token_type_ids_T=None if token_types is None else torch.from_numpy(token_types),
            num_documents=len(chosen),
            num_tokens=real,
            num_labels=num_labels,
            indices=tuple(chosen.tolist()),
            token_runs_2T=torch.from_numpy(_runs(input_ids)) if self.sort_tokens else None,
        )

    def _reads(self, chosen: np.ndarray, boundaries: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Positions the head reads, the labels there, and how many of them count."""
        if self.place == "document":
            reads = boundaries[:-1] if self.pool == "first" else boundaries[1:] - 1
            labels = _document_labels(self.store, chosen, self.with_labels)
            slots = self.micro_batch_size if self.bucket_tokens > 1 else len(chosen)
        else:
            labels = _token_labels(self.store, chosen, self.place == "next_token", self.with_labels)
            reads = np.flatnonzero(labels != IGNORE) if self.with_labels else np.arange(len(labels))
            labels = labels[reads]
            slots = max(len(reads), 1)
            if self.bucket_tokens > 1:
                slots = int(read_slots(slots, len(chosen), total, self.bucket_reads or self.bucket_tokens))
        num_labels = len(labels) if self.with_labels else 0
        return _grown(reads.astype(np.int64), slots, 0), _grown(labels, slots, _no_label(labels)), num_labels


@dataclass(frozen=True)
class PaddedCollator:
    """Makes `PaddedBatch`es, for models that cannot be packed."""

    store: TokenStore
    place: LabelPlace
    pad_token_id: int
    padding_side: Literal["left", "right"] = "right"
    with_labels: bool = True
    pad_to_multiple_of: int = 1
    """Columns are rounded up to a multiple of this, so that fewer shapes occur."""

    pads = True  # a step's samples are sorted by length before they are split, which saves padding

    def __call__(self, indices: Sequence[int]) -> PaddedBatch:
        store, chosen = self.store, np.asarray(indices, dtype=np.int64)
        lengths = store.lengths[chosen]
        width = rounded_up(int(lengths.max()), self.pad_to_multiple_of)
        real = self._mask(lengths, width)
        labels, num_labels = self._labels(chosen, real)
        types = _gathered(store.token_types, store.offsets, chosen)
        ids = _gathered(store.input_ids, store.offsets, chosen)
        return PaddedBatch(
            input_ids_BS=torch.from_numpy(_laid_out(ids, real, self.pad_token_id)),
            attention_mask_BS=torch.from_numpy(real.astype(np.int64)),
            labels=torch.from_numpy(labels),
            token_type_ids_BS=None if types is None else torch.from_numpy(_laid_out(types, real, 0)),
            num_documents=len(chosen),
            num_tokens=int(lengths.sum()),
            num_labels=num_labels,
            indices=tuple(chosen.tolist()),
        )

    def _mask(self, lengths: np.ndarray, width: int) -> np.ndarray:
        columns = np.arange(width)
        if self.padding_side == "right":
            return columns[None, :] < lengths[:, None]
        return columns[None, :] >= width - lengths[:, None]

    def _labels(self, chosen: np.ndarray, real: np.ndarray) -> tuple[np.ndarray, int]:
        store = self.store
        if self.place == "document":
            labels = _document_labels(store, chosen, self.with_labels)
            return labels, len(labels) if self.with_labels else 0
        if self.place == "target":
            if not self.with_labels or store.target_ids is None or store.target_offsets is None:
                return np.full((len(chosen), 1), IGNORE, dtype=np.int64), 0
            lengths = np.diff(store.target_offsets)[chosen]
            filled = np.arange(int(lengths.max()))[None, :] < lengths[:, None]  # targets are padded on the right
            targets = _gathered(store.target_ids, store.target_offsets, chosen)
            return _laid_out(targets, filled, IGNORE), int(lengths.sum())
        flat = _token_labels(store, chosen, self.place == "next_token", self.with_labels)
        return _laid_out(flat, real, IGNORE), int((flat != IGNORE).sum())


Collator = PackedCollator | PaddedCollator


def _runs(ids: np.ndarray) -> np.ndarray:
    """(2, T): places in order of the ids, and the length of each run of equal ids where it starts."""
    runs = np.zeros((2, len(ids)), dtype=np.int32)
    runs[0] = np.argsort(ids, kind="stable")
    ordered = ids[runs[0]]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    runs[1, starts] = np.diff(np.append(starts, len(ids)))
    return runs


def rounded_up(count: Any, multiple: int) -> Any:
    return -(-count // multiple) * multiple


def read_slots(reads: Any, documents: int, total: Any, multiple: int) -> Any:
    """Room for so many read positions; for numbers and arrays of them. Where every token is learned, each document
    reads one position less than it has. Rounded up by itself, that number made two shapes of most totals: 59
    recordings in 800 steps instead of 31, to spare the head half a percent of its rows."""
    nearly_all = total - reads < multiple + documents
    return np.where(nearly_all, total, rounded_up(reads, multiple))


def _tail_lengths(tail: int, max_seqlen: int) -> np.ndarray:
    """Lengths of the dummy documents that fill up the bucket."""
    whole, rest = divmod(tail, max_seqlen)
    return np.asarray([max_seqlen] * whole + ([rest] if rest else []), dtype=np.int64)


def _gathered(flat: np.ndarray | None, offsets: np.ndarray, chosen: np.ndarray, total: int | None = None):
    """The chosen samples' parts of a flat array, end to end, as int64; zeros fill it up to `total`."""
    if flat is None:
        return None
    parts = [flat[offsets[i] : offsets[i + 1]] for i in chosen]
    length = sum(len(part) for part in parts)
    out = np.zeros(length if total is None else total, dtype=np.int64)
    np.concatenate(parts, out=out[:length], casting="safe")
    return out


def _positions(boundaries: np.ndarray, total: int) -> np.ndarray:
    """0, 1, 2, … in every document."""
    lengths = np.diff(boundaries)
    return np.arange(total, dtype=np.int64) - np.repeat(boundaries[:-1], lengths)


def _document_labels(store: TokenStore, chosen: np.ndarray, wanted: bool) -> np.ndarray:
    if not wanted or store.labels is None:
        return np.full(len(chosen), IGNORE, dtype=np.int64)
    return np.array(store.labels[chosen])


def _token_labels(store: TokenStore, chosen: np.ndarray, shift: bool, wanted: bool) -> np.ndarray:
    """The label each position is asked for: its own, or (causal LM) the next token's. The last position of a document
    predicts nothing, so no document ever predicts the first token of its neighbour."""
    lengths = store.lengths[chosen]
    if not wanted or store.token_labels is None:
        return np.full(int(lengths.sum()), IGNORE, dtype=np.int64)
    labels = _gathered(store.token_labels, store.offsets, chosen)
    if shift:
        labels[:-1] = labels[1:].copy()
        labels[np.cumsum(lengths) - 1] = IGNORE
    return labels


def _no_label(labels: np.ndarray) -> float:
    """IGNORE could be a real regression target; NaN never is."""
    return float("nan") if labels.dtype.kind == "f" else IGNORE


def _grown(array: np.ndarray, slots: int, filler: float) -> np.ndarray:
    if len(array) == slots:
        return np.ascontiguousarray(array)
    grown = np.full((slots, *array.shape[1:]), filler, dtype=array.dtype)
    grown[: len(array)] = array
    return grown


def _laid_out(flat: np.ndarray, places: np.ndarray, filler: int) -> np.ndarray:
    """A rectangle with the flat values in its `places`, row by row, and the filler elsewhere."""
    out = np.full(places.shape, filler, dtype=np.int64)
    out[places] = flat
    return out
