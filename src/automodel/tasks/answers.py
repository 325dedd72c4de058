"""What a model says about a text, as values: one class for each task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from automodel.metrics.scores import entity_spans, is_bio


@dataclass(frozen=True)
class Answer:
    """A prediction for one text."""

    def to_json(self) -> dict[str, Any]:
        """The columns a prediction adds to a row; what the task has no use for is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Classification(Answer):
    """The class of a text."""

    prediction: str | list[str] | float | list[float]
    """The class; every class above 0.5 (multi-label); or the number (regression)."""
    score: float | None = None
    """Probability of the class."""
    scores: dict[str, float] | None = None
    """Probability of every class."""


@dataclass(frozen=True)
class Tagging(Answer):
    """Tags of a text's words."""

    words: list[str]
    prediction: list[str | None]
    """A tag for each word; None for words beyond `max_length`."""
    scores: list[float | None]
    entities: list[dict[str, Any]] | None
    """`type`, `text`, `score` and `words` (first, last + 1), and `start` and `end` in the text where there was one;
    None where the tags are not BIO."""


@dataclass(frozen=True)
class Generation(Answer):
    """A text that was generated."""

    prediction: str
    finish_reason: Literal["stop", "length"]
    """Whether the model ended the text, or the limit did."""


def grouped_entities(
    words: Sequence[str],
    tags: Sequence[str | None],
    scores: Sequence[float | None],
    label_names: Sequence[str],
    text: str | Sequence[str],
    places: Sequence[tuple[int, int]] | None,
) -> list[dict[str, Any]] | None:
    """Entities by the rule that the metrics count them with. `places` are the words' characters in a text; None where
    the words were given."""
    if not is_bio(label_names):
        return None
    names = [*label_names, "O"]  # a word without a tag is in no entity
    labels = np.asarray([names.index(tag if tag is not None else "O") for tag in tags], dtype=np.int64)
    found = []
    for first, last, kind in sorted(entity_spans(labels, np.zeros_like(labels), names)):
        part = slice(first, last + 1)
        entity: dict[str, Any] = {
            "type": kind,
            "text": " ".join(words[part]),
            "score": float(np.mean([score for score in scores[part] if score is not None])),
            "words": [first, last + 1],
        }
        if isinstance(text, str) and places is not None:
            start, end = places[first][0], places[last][1]
            entity |= {"text": text[start:end], "start": start, "end": end}
        found.append(entity)
    return found
