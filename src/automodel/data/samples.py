"""Tokenised samples as flat arrays: the form in which they are made, stored and read.

A sample is one tokenised document with its labels. Thousands of them are kept as one long array of tokens plus their
lengths, never as Python lists of lists: a chunk crosses from a worker process in a few large copies, is appended to
disk as it is, and is read back by slicing.

`SampleWriter` is where encoders put samples one at a time; `Samples` is the finished chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Numbers = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be trained on, and why."""

    row: int
    reason: str


@dataclass(frozen=True)
class Samples:
    """Samples of one chunk of rows. Optional arrays are None where the task has no use for them."""

    rows: np.ndarray
    """int64 (N,): row of the dataset each sample comes from."""
    lengths: np.ndarray
    """int64 (N,): tokens of each sample."""
    input_ids: np.ndarray
    """int32, all tokens one after another."""
    token_labels: np.ndarray | None = None
    """int32 beside `input_ids`: the label of each token itself (nothing is shifted here)."""
    token_types: np.ndarray | None = None
    """uint8 beside `input_ids`: segment of each token in a text pair."""
    labels: np.ndarray | None = None
    """int64 (N,) class ids, or float32 (N, C) for multi-label and regression."""
    target_lengths: np.ndarray | None = None
    """int64 (N,): tokens of each target (seq2seq)."""
    target_ids: np.ndarray | None = None
    """int32, all target tokens one after another (seq2seq)."""
    truncated: int = 0
    """Samples that were longer than `max_length` and were cut."""
    truncated_targets: int = 0
    """Samples whose target was longer than `max_target_length` and was cut (seq2seq)."""
    longest: int = 0
    """Tokens of the longest document before it was cut or split."""
    longest_target: int = 0
    """Tokens of the longest target before it was cut (seq2seq)."""
    lost_tags: int = 0
    """Words with a tag that have no token (token classification)."""
    unsaid: int = 0
    """Rows of which the chat template leaves out something that the assistant says."""
    bad: tuple[BadRow, ...] = ()
    """Rows left out, with reasons."""

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass
class SampleWriter:
    """Collects the samples of one chunk; `finish` turns them into arrays."""

    rows: list[int] = field(default_factory=list)
    input_ids: list[Numbers] = field(default_factory=list)
    token_labels: list[Numbers] = field(default_factory=list)
    token_types: list[Numbers] = field(default_factory=list)
    labels: list[int | Sequence[float]] = field(default_factory=list)
    target_ids: list[Numbers] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    truncated: int = 0
    truncated_targets: int = 0
    longest: int = 0
    longest_target: int = 0
    lost_tags: int = 0
    unsaid: int = 0

    def add(
        self,
        row: int,
        input_ids: Numbers,
        *,
        whole: int | None = None,
        whole_target: int | None = None,
        token_labels: Numbers | None = None,
        token_types: Numbers | None = None,
        label: int | Sequence[float] | None = None,
        target_ids: Numbers | None = None,
    ) -> None:
        """One finished sample. A chunk's samples all carry the same optional parts. `whole` and `whole_target`: the
        tokens of text and target before they were cut, where an encoder may cut them."""
        self.see_document(len(input_ids) if whole is None else whole)
        self.truncated += whole is not None and whole > len(input_ids)
        if target_ids is not None:
            before = len(target_ids) if whole_target is None else whole_target
            self.longest_target = max(self.longest_target, before)
            self.truncated_targets += before > len(target_ids)
        self.rows.append(row)
        self.input_ids.append(input_ids)
        if token_labels is not None:
            self.token_labels.append(token_labels)
        if token_types is not None:
            self.token_types.append(token_types)
        if label is not None:
            self.labels.append(label)
        if target_ids is not None:
            self.target_ids.append(target_ids)

    def see_document(self, tokens: int) -> None:
        """A document has so many tokens, however it becomes samples."""
        self.longest = max(self.longest, tokens)

    def reject(self, row: int, reason: str) -> None:
        """A row that cannot be used."""
        self.bad.append(BadRow(row, reason))

    def finish(self) -> Samples:
        count = len(self.rows)
        for name in ("token_labels", "token_types", "labels", "target_ids"):
            assert len(getattr(self, name)) in (0, count), f"{name} given for some samples only"
        return Samples(
            rows=np.asarray(self.rows, dtype=np.int64),
            lengths=_lengths(self.input_ids),
            input_ids=_flat(self.input_ids, np.int32),
            token_labels=_flat(self.token_labels, np.int32) if self.token_labels else None,
            token_types=_flat(self.token_types, np.uint8) if self.token_types else None,
            labels=_label_array(self.labels) if self.labels else None,
            target_lengths=_lengths(self.target_ids) if self.target_ids else None,
            target_ids=_flat(self.target_ids, np.int32) if self.target_ids else None,
            truncated=self.truncated,
            truncated_targets=self.truncated_targets,
            longest=self.longest,
            longest_target=self.longest_target,
            lost_tags=self.lost_tags,
            unsaid=self.unsaid,
            bad=tuple(self.bad),
        )


def _lengths(parts: list[Numbers]) -> np.ndarray:
    return np.fromiter((len(part) for part in parts), dtype=np.int64, count=len(parts))


def _flat(parts: list[Numbers], dtype: type) -> np.ndarray:
    if not parts:
        return np.zeros(0, dtype=dtype)
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts])


def _label_array(labels: list[int | Sequence[float]]) -> np.ndarray:
    if isinstance(labels[0], (int, np.integer)):
        return np.asarray(labels, dtype=np.int64)
    return np.asarray(labels, dtype=np.float32)
