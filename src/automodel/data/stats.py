"""What the data looked like: counted once, while it was tokenised, and kept with the token store.

It becomes `run/data.json` and the length histogram of the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from automodel.config.errors import UserError
from automodel.data.samples import BadRow, Samples

BINS = 16
SHOWN_IN_ERRORS = 10
SHOWN_IN_STATS = 20


@dataclass(frozen=True)
class DataStats:
    """Counts of one dataset."""

    rows: int
    """Rows of the dataset, after its split and limit were applied."""
    used: int
    """Samples that are trained on. Equal to rows − skipped, except for plain text, where long rows make several."""
    skipped: int
    skipped_rows: tuple[dict[str, Any], ...]
    """`{"row", "reason"}` of the first ones."""
    truncated: int
    """Samples that were longer than `max_length` and were cut."""
    tokens: int
    max_length: int
    length_histogram: dict[str, list[int]]
    label_names: tuple[str, ...] | None
    label_counts: tuple[int, ...] | None

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DataStats:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**values)


class Counter:
    """Watches the samples go by on their way into the store."""

    def __init__(self) -> None:
        self.bad: list[BadRow] = []
        self.lengths: list[np.ndarray] = []
        self.labels: list[np.ndarray] = []
        self.truncated = 0

    def watching(self, chunks: Iterable[Samples], token_labels: bool) -> Iterator[Samples]:
        """Passes chunks through; `token_labels` counts the labels of tokens (token classification)."""
        for chunk in chunks:
            self.bad.extend(chunk.bad)
            self.lengths.append(chunk.lengths)
            self.truncated += chunk.truncated
            labels = chunk.token_labels if token_labels else chunk.labels
            if labels is not None:
                self.labels.append(_counted(labels))
            yield chunk

    def longest(self) -> int:
        return max(int(lengths.max()) for lengths in self.lengths if len(lengths))

    def stats(self, rows: int, max_length: int, names: Sequence[str] | None, num_labels: int | None) -> DataStats:
        lengths = np.concatenate(self.lengths) if self.lengths else np.zeros(0, dtype=np.int64)
        counts = None
        if self.labels and num_labels:
            counts = tuple(sum(int(c[i]) if i < len(c) else 0 for c in self.labels) for i in range(num_labels))
        return DataStats(
            rows=rows,
            used=len(lengths),
            skipped=len(self.bad),
            skipped_rows=tuple({"row": b.row, "reason": b.reason} for b in self.bad[:SHOWN_IN_STATS]),
            truncated=self.truncated,
            tokens=int(lengths.sum()),
            max_length=max_length,
            length_histogram=_histogram(lengths),
            label_names=None if names is None else tuple(names),
            label_counts=counts,
        )

    def check(self, rows: int, section: str, skip: bool) -> None:
        """Every bad row at once, or nothing left: errors that say which rows, and what to do."""
        if self.bad and not skip:
            one = len(self.bad) == 1
            lines = [f"  row {b.row}: {b.reason}" for b in self.bad[:SHOWN_IN_ERRORS]]
            if len(self.bad) > SHOWN_IN_ERRORS:
                lines.append(f"  … and {len(self.bad) - SHOWN_IN_ERRORS:,} more")
            raise UserError(
                f"{section}: {len(self.bad):,} of {rows:,} rows cannot be used (rows are counted from 0):\n"
                + "\n".join(lines)
                + f"\nPut {'it' if one else 'them'} right, or leave {'it' if one else 'them'} out with "
                f"{section}.on_bad_row: skip."
            )
        if len(self.bad) == rows:
            first = self.bad[0]
            raise UserError(
                f"{section}: all {rows:,} rows were skipped, so nothing is left to work with. "
                f"The first one, row {first.row}: {first.reason}."
            )


def _counted(labels: np.ndarray) -> np.ndarray:
    """How often each class occurs; positives of each class for multi-label vectors."""
    if labels.ndim == 2:
        return (labels > 0.5).sum(axis=0)
    return np.bincount(labels[labels >= 0].astype(np.int64))


def _histogram(lengths: np.ndarray) -> dict[str, list[int]]:
    """Counts of lengths in equal, whole-numbered bins from 0."""
    longest = int(lengths.max()) if len(lengths) else 1
    width = -(-(longest + 1) // BINS)
    edges = list(range(0, longest + 1 + width, width))
    counts, _ = np.histogram(lengths, bins=edges)
    return {"edges": edges, "counts": counts.tolist()}
