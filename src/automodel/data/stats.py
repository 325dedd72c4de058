"""What the data looked like: counted once, while it was tokenised, and kept with the token store.

It becomes `run/data.json` and the length histogram of the report. It is also the last check of what a language model
will be taught, after everything was cut: how many tokens carry a label, whether a sample has none, and whether the end
of each document is learned, without which a model does not stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.data.row_format import LabelPlace
from automodel.data.samples import BadRow, Samples

BINS = 16
SHOWN_IN_ERRORS = 20
SHOWN_IN_STATS = 20


@dataclass(frozen=True)
class Cut:
    """What a limit has cut off."""

    what: str
    """`samples` or `targets`."""
    count: int
    of: int
    key: str
    limit: int
    longest: int
    """Tokens of the longest one before it was cut."""

    @property
    def how_many(self) -> str:
        """`131 of 1,000 samples (13.1%)`."""
        share = self.count / max(1, self.of)
        shown = "under 0.1%" if share < 0.001 else f"{share:.1%}"
        return f"{self.count:,} of {self.of:,} {self.what} ({shown})"

    @property
    def why(self) -> str:
        """`longer than max_length 512; the longest has 3,127 tokens`."""
        return f"longer than {self.key} {self.limit:,}; the longest has {self.longest:,} tokens"


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
    supervised: int | None = None
    """Tokens that are learned (language models); targets for seq2seq."""
    ended: int | None = None
    """Rows whose last learned token ends the text: the end-of-sequence token, or a template's own."""
    lost_tags: int = 0
    """Words with a tag that have no token (token classification)."""
    unsaid: int = 0
    """Rows of which the chat template leaves out something that the assistant says."""
    longest: int = 0
    """Tokens of the longest document before it was cut or split."""
    truncated_targets: int = 0
    """Samples whose target was longer than `max_target_length` and was cut (seq2seq)."""
    max_target_length: int = 0
    longest_target: int = 0
    """Tokens of the longest target before it was cut (seq2seq)."""

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """What was cut of the texts, and of the targets; empty where nothing was."""
        found = (
            Cut("samples", self.truncated, self.used, "max_length", self.max_length, self.longest),
            Cut(
                "targets",
                self.truncated_targets,
                self.used,
                "max_target_length",
                self.max_target_length,
                self.longest_target,
            ),
        )
        return tuple(cut for cut in found if cut.count)

    @property
    def unended(self) -> int:
        """Used rows of a language model whose end is not learned."""
        return 0 if self.ended is None else self.rows - self.skipped - self.ended

    @property
    def supervised_share(self) -> float:
        """Share of the tokens that are learned; 1 for seq2seq, where they are tokens of their own."""
        return 0.0 if self.supervised is None else min(1.0, self.supervised / max(1, self.tokens))

    def learned_in_words(self, targets: bool = False, share: float | None = None) -> str:
        """`23.4 % of the tokens are learned, the end of every answer among them`. `share`: of an epoch, where that is
        not every sample once."""
        if self.supervised is None:
            return ""
        learned = (
            f"{self.supervised:,} target tokens" if targets else f"{share or self.supervised_share:.1%} of the tokens"
        )
        used = self.rows - self.skipped
        ends = "the end of every document" if not self.unended else f"the end of {self.ended:,} of {used:,} documents"
        return f"{learned} are learned, {ends} among them"

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DataStats:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**values)


class Counter:
    """Watches the samples go by on their way into the store. `place`: where the labels stand. `ends`: the tokens
    that end a text."""

    def __init__(self, place: LabelPlace, ends: frozenset[int] = frozenset()) -> None:
        self.place = place
        self.ends = np.asarray(sorted(ends), dtype=np.int64)
        self.rows = 0
        self.partial = False  # only the first rows are looked at
        self.part: str | None = None  # of the data, as `split` names it: rows are counted from where it begins
        self.bad: list[BadRow] = []
        self.unlearned: list[BadRow] = []
        self.lengths: list[np.ndarray] = []
        self.labels: list[np.ndarray] = []
        self.truncated = 0
        self.truncated_targets = 0
        self.longest_whole = 0  # before anything was cut or split
        self.longest_target = 0
        self.lost_tags = 0
        self.unsaid = 0
        self.supervised = 0
        self.ended = 0

    def watching(self, chunks: Iterable[Samples]) -> Iterator[Samples]:
        """Passes chunks through."""
        for chunk in chunks:
            self.bad.extend(chunk.bad)
            self.lengths.append(chunk.lengths)
            self.truncated += chunk.truncated
            self.truncated_targets += chunk.truncated_targets
            self.longest_whole = max(self.longest_whole, chunk.longest)
            self.longest_target = max(self.longest_target, chunk.longest_target)
            self.lost_tags += chunk.lost_tags
            self.unsaid += chunk.unsaid
            labels = chunk.token_labels if self.place == "token" else chunk.labels
            if labels is not None:
                self.labels.append(_counted(labels))
            if self.is_language_model and len(chunk):
                self._watch_what_is_learned(chunk)
            yield chunk

    @property
    def is_language_model(self) -> bool:
        return self.place in ("next_token", "target")

    def _watch_what_is_learned(self, chunk: Samples) -> None:
        """After everything was cut: which tokens are learned, and is the last of them an end?"""
        if chunk.target_ids is not None and chunk.target_lengths is not None:
            ids, learned, lengths = chunk.target_ids, np.ones(len(chunk.target_ids), dtype=bool), chunk.target_lengths
        else:
            assert chunk.token_labels is not None
            ids, learned, lengths = chunk.input_ids, chunk.token_labels != IGNORE, chunk.lengths
            learned[np.cumsum(lengths) - lengths] = False  # nothing stands before a first token that could predict it
        places, stops = np.flatnonzero(learned), np.cumsum(lengths)
        counts = np.diff(np.searchsorted(places, stops, side="left"), prepend=0)
        for row in chunk.rows[counts == 0]:
            self.unlearned.append(BadRow(int(row), "no token of the sample is learned"))
        self.supervised += len(places)
        last_of_row = np.append(chunk.rows[1:] != chunk.rows[:-1], True)
        last = places[np.searchsorted(places, stops, side="left") - 1] if len(places) else places
        if len(last):
            self.ended += int((np.isin(ids[last], self.ends) & (counts > 0) & last_of_row).sum())

    @property
    def samples(self) -> int:
        return sum(map(len, self.lengths))

    def longest(self) -> int:
        return max(int(lengths.max()) for lengths in self.lengths if len(lengths))

    @classmethod
    def joined(cls, counters: Sequence[Counter], names: Sequence[str]) -> Counter:
        """One counter for several datasets, each of which counts its rows from 0."""
        whole = cls(counters[0].place)
        for counter, own in zip(counters, names, strict=True):
            whole.rows += counter.rows
            whole.bad += [replace(b, reason=f"{b.reason} ({own})") if len(names) > 1 else b for b in counter.bad]
            for name in ("unlearned", "lengths", "labels"):
                getattr(whole, name).extend(getattr(counter, name))
            for name in ("truncated", "truncated_targets", "lost_tags", "unsaid", "supervised", "ended"):
                setattr(whole, name, getattr(whole, name) + getattr(counter, name))
            for name in ("longest_whole", "longest_target"):
                setattr(whole, name, max(getattr(whole, name), getattr(counter, name)))
        return whole

    def stats(
        self, max_length: int, names: Sequence[str] | None, num_labels: int | None, max_target_length: int = 0
    ) -> DataStats:
        lengths = np.concatenate(self.lengths) if self.lengths else np.zeros(0, dtype=np.int64)
        counts = None
        if self.labels and num_labels:
            counts = tuple(sum(int(c[i]) if i < len(c) else 0 for c in self.labels) for i in range(num_labels))
        return DataStats(
            rows=self.rows,
            used=len(lengths),
            skipped=len(self.bad),
            skipped_rows=tuple({"row": b.row, "reason": b.reason} for b in self.bad[:SHOWN_IN_STATS]),
            truncated=self.truncated,
            tokens=int(lengths.sum()),
            max_length=max_length,
            length_histogram=_histogram(lengths),
            label_names=None if names is None else tuple(names),
            label_counts=counts,
            supervised=self.supervised if self.is_language_model else None,
            ended=self.ended if self.is_language_model else None,
            lost_tags=self.lost_tags,
            unsaid=self.unsaid,
            longest=self.longest_whole,
            truncated_targets=self.truncated_targets,
            max_target_length=max_target_length,
            longest_target=self.longest_target,
        )

    def check(self, section: str, skip: bool) -> None:
        """Every bad row at once, or nothing left: errors that say which rows, and what to do."""
        rows = self.rows
        wrong = [*([] if skip else self.bad), *self.unlearned]  # encoders reject the latter, so there should be none
        wrong.sort(key=lambda bad: bad.row)
        if wrong:
            them, root = "it" if len(wrong) == 1 else "them", section.split(".")[0]
            longer = f"raise {root}.max_length, " if any("max_length" in b.reason for b in wrong) else ""
            lines = [f"  row {b.row}: {b.reason}" for b in wrong[:SHOWN_IN_ERRORS]]
            if len(wrong) > SHOWN_IN_ERRORS:
                lines.append(f"  … and {len(wrong) - SHOWN_IN_ERRORS:,} more")
            first = "the first " if self.partial else ""
            within = f", within {self.part}" if self.part else ""
            raise UserError(
                f"{section}: {len(wrong):,} of {first}{rows:,} rows cannot be used (rows are counted from 0{within}):\n"
                + "\n".join(lines)
                + f"\nPut {them} right, {longer}or leave {them} out with {root}.on_bad_row: skip."
            )
        if len(self.bad) == rows and not self.partial:
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
