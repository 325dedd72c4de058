"""Packing for supervised tuning, with TRL's strategies: rows of `size` tokens filled with several documents.

    bfd         whole documents, longest first, each into the fullest row that has room for it (of equal ones, the one
                that has waited longest); longer ones are cut
    bfd_split   the same, but the rest of a longer one is a document of its own
    wrapped     everything one after the other, cut every `size` tokens: rows are plain rows, and what was cut through
                is seen as one text

Like TRL, a thousand documents are packed at a time, so that streams can be packed too. Rows of the first two remember
where documents begin (`seq_lengths`); they never see each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

from automodel.data.batch import IGNORE

STRATEGIES = ("bfd", "bfd_split", "wrapped")
AT_ONCE = 1000  # documents; TRL's, and part of what a row holds

Documents = list[tuple[list[int], list[int]]]
"""Tokens and labels."""


def packed_rows(dataset: Any, size: int, strategy: str = "bfd") -> Any:
    """The dataset, whose columns are `input_ids` and `labels` and perhaps others, as packed rows."""
    columns = dataset.column_names or list(next(iter(dataset)))

    def pack(chunk: dict[str, list]) -> dict[str, list]:
        documents = list(zip(chunk["input_ids"], chunk["labels"]))
        return _wrapped(documents, size) if strategy == "wrapped" else _filled(documents, size, strategy == "bfd_split")

    return dataset.map(pack, batched=True, batch_size=AT_ONCE, remove_columns=columns)


def _wrapped(documents: Documents, size: int) -> dict[str, list]:
    ids, labels = (list(chain.from_iterable(parts)) for parts in zip(*documents))
    starts = range(0, len(ids), size)
    return {
        "input_ids": [ids[i : i + size] for i in starts],
        "attention_mask": [[1] * len(ids[i : i + size]) for i in starts],
        "labels": [labels[i : i + size] for i in starts],
    }


def _filled(documents: Documents, size: int, split: bool) -> dict[str, list]:
    pieces = list(_pieces(documents, size, split))
    rows = best_fit([len(ids) for ids, _ in pieces], size)
    return {
        "input_ids": [[token for i in row for token in pieces[i][0]] for row in rows],
        "labels": [[label for i in row for label in pieces[i][1]] for row in rows],
        "seq_lengths": [[len(pieces[i][0]) for i in row] for row in rows],
    }


def _pieces(documents: Documents, size: int, split: bool) -> Iterator[tuple[list[int], list[int]]]:
    for ids, labels in documents:
        for start in range(0, len(ids) if split else 1, size):
            yield ids[start : start + size], labels[start : start + size]


def best_fit(lengths: list[int], size: int) -> list[list[int]]:
    """Which documents share a row."""
    room: dict[int, deque[list[int]]] = {}
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = min((free for free, waiting in room.items() if waiting and free >= lengths[index]), default=None)
        row = room[fits].popleft() if fits is not None else []
        if fits is None:
            rows.append(row)
        row.append(index)
        room.setdefault((size if fits is None else fits) - lengths[index], deque()).append(row)
    return rows


class FlatCollator:
    """One line of all documents of a batch, with positions that start anew in each, and no padding."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        ids, labels, positions = [], [], []
        for row in rows:
            ids += row["input_ids"]
            begin = 0
            for length in row.get("seq_lengths", (len(row["input_ids"]),)):
                labels += [IGNORE, *row["labels"][begin + 1 : begin + length]]  # nothing predicts a first token
                positions += range(length)
                begin += length
        made = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.tensor([values], dtype=torch.int64) for name, values in made.items()}
