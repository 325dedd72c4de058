"""Looking at tokenised data: samples as text with what is learned of them, lengths, and the padding packing avoids.

Everything is read from the token store that training will read, so what is shown is what is trained on, after
templates, cutting and label masks have done their work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from automodel.data.batch import IGNORE
from automodel.data.prepare import PreparedData
from automodel.data.special_tokens import special_ids

QUANTILES = {"shortest": 0.0, "median": 0.5, "p95": 0.95, "longest": 1.0}


@dataclass(frozen=True)
class Piece:
    """A stretch of tokens of one kind, as text."""

    text: str
    learned: bool
    """Whether these tokens are labels: what the model is trained to say."""
    special: bool
    """Whether they are special tokens of the tokenizer."""
    tag: str | None = None
    """The class of a token (token classification)."""


@dataclass(frozen=True)
class ShownSample:
    """One sample as a person can read it."""

    index: int
    row: int
    """Row of the dataset, from 0."""
    tokens: int
    learned: int | None
    """Tokens that are learned; None where the label is not made of tokens."""
    pieces: tuple[Piece, ...]
    target: tuple[Piece, ...] = ()
    """What seq2seq models learn to answer."""
    label: str | None = None
    """The class, or the classes (text classification)."""
    dataset: str | None = None
    """Which dataset of a mixture it comes from."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def shown_sample(data: PreparedData, tokenizer: Any, index: int) -> ShownSample:
    store = data.store
    ids, labels = _part(store.input_ids, store.offsets, index), _part(store.token_labels, store.offsets, index)
    target = _part(store.target_ids, store.target_offsets, index)
    learned = np.zeros(len(ids), dtype=bool)
    if labels is not None:
        learned = labels != IGNORE
        if data.row_format.labels == "next_token":
            learned[:1] = False  # nothing stands before the first token that could predict it
    tags = None
    if data.row_format.labels == "token" and labels is not None:
        tags = [_class_name(data, int(label)) if label != IGNORE else None for label in labels]
    count = int(learned.sum()) if labels is not None else None if target is None else len(target)
    return ShownSample(
        index=index,
        row=int(store.rows[index]) - _rows_before(data, index),
        tokens=len(ids),
        learned=count,
        pieces=_pieces(tokenizer, ids, learned, tags),
        target=() if target is None else _pieces(tokenizer, target, np.ones(len(target), dtype=bool), None),
        label=_label(data, index),
        dataset=_member(data, index)[0],
    )


def _part(flat: np.ndarray | None, offsets: np.ndarray | None, index: int) -> Any:
    return None if flat is None or offsets is None else flat[offsets[index] : offsets[index + 1]].astype(np.int64)


def _pieces(tokenizer: Any, ids: np.ndarray, learned: np.ndarray, tags: list[str | None] | None) -> tuple[Piece, ...]:
    """Runs of equal kind, each decoded in its place: a token's text may depend on what stands before it."""
    special = np.isin(ids, [*special_ids(tokenizer)])
    kinds = [
        (bool(learn), bool(mark), tags[i] if tags else None) for i, (learn, mark) in enumerate(zip(learned, special))
    ]
    cuts = [i for i in range(1, len(ids)) if kinds[i] != kinds[i - 1] or kinds[i][2] is not None]
    pieces, before = [], ""
    for start, stop in zip([0, *cuts], [*cuts, len(ids)]):
        whole = _decoded(tokenizer, ids[:stop])
        text = whole[len(before) :] if whole.startswith(before) else _decoded(tokenizer, ids[start:stop])
        before = whole
        learn, mark, tag = kinds[start]
        pieces.append(Piece(text, learn, mark, tag))
    return tuple(pieces)


def _decoded(tokenizer: Any, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _class_name(data: PreparedData, number: int) -> str:
    return data.label_names[number] if data.label_names and number < len(data.label_names) else str(number)


def _label(data: PreparedData, index: int) -> str | None:
    if data.store.labels is None:
        return None
    value = data.store.labels[index]
    if value.ndim == 0 and np.issubdtype(value.dtype, np.integer):
        return _class_name(data, int(value))
    if data.problem_type == "regression":
        return ", ".join(f"{number:g}" for number in np.atleast_1d(value))
    present = [_class_name(data, i) for i, flag in enumerate(value) if flag > 0.5]
    return ", ".join(present) or "none of the classes"


def _member(data: PreparedData, index: int) -> tuple[str | None, int]:
    """The dataset of a mixture that a sample comes from: its name and its number."""
    if data.mixture is None:
        return None, 0
    number = int(np.searchsorted(np.cumsum(data.mixture.sizes), index, side="right"))
    return data.mixture.names[number], number


def _rows_before(data: PreparedData, index: int) -> int:
    """Rows of the datasets of a mixture that come before this sample's own."""
    return sum(part["rows"] for part in data.store.meta.get("parts", ())[: _member(data, index)[1]])


def length_summary(lengths: np.ndarray) -> dict[str, float]:
    """Lengths in a few numbers."""
    found = {name: float(np.quantile(lengths, share)) for name, share in QUANTILES.items()}
    return {**found, "mean": float(lengths.mean())}


def padding_share(lengths: np.ndarray, batches: Iterable[np.ndarray]) -> float:
    """Share of padding if each of these batches were a rectangle as wide as its longest sample."""
    real = drawn = 0
    for chosen in batches:
        own = lengths[chosen]
        real += int(own.sum())
        drawn += int(own.max()) * len(own)
    return 1.0 - real / max(1, drawn)
