"""Text classification and token classification: rows of text (or of words) with labels.

Texts are tokenised as the tokenizer itself would for this model, special tokens included. A word's label sits on its
first piece; further pieces and special tokens carry IGNORE, so a long word counts no more than a short one.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

from automodel.data.batch import IGNORE
from automodel.data.labels import BadLabel, LabelMap
from automodel.data.python_tokenizers import whole_length, word_numbers
from automodel.data.samples import SampleWriter


def text_problem(text: Any, what: str = "text") -> str | None:
    """Why a value is no usable text, or None."""
    if text is None:
        return f"the {what} is missing"
    if not isinstance(text, str):
        return f"the {what} is {type(text).__name__} and not text"
    return None if text.strip() else f"the {what} is empty"


@dataclass(frozen=True)
class TextClassifier:
    """Texts, or pairs of them, each with one label (or a vector of them)."""

    tokenizer: Any
    text: str
    pair: str | None
    label: str | tuple[str, ...]
    labels: LabelMap
    max_length: int
    token_types: bool
    class_names: tuple[str, ...] | None = None
    """Names behind this dataset's own ids, where they differ from the training data's."""

    @property
    def columns(self) -> tuple[str, ...]:
        label = (self.label,) if isinstance(self.label, str) else self.label
        return tuple(dict.fromkeys([self.text, *([self.pair] if self.pair else []), *label]))

    @property
    def record(self) -> dict[str, Any]:
        """What a run notes of it: a model of pairs must not be asked about single texts."""
        return {"kind": "texts", "text": self.text, "pair": self.pair}

    def encode(self, rows: dict[str, list], first: int, out: SampleWriter) -> None:
        kept: list[tuple[int, Any]] = []
        for i in range(len(rows[self.text])):
            problem = text_problem(rows[self.text][i])
            if problem is None and self.pair:
                problem = text_problem(rows[self.pair][i], f"text in '{self.pair}'")
            if problem is None:
                try:
                    kept.append((i, self.labels(self._label(rows, i))))
                    continue
                except BadLabel as error:
                    problem = str(error)
            out.reject(first + i, problem)
        if not kept:
            return
        pairs = [rows[self.pair][i] for i, _ in kept] if self.pair else None
        encoded = self.tokenizer(
            [rows[self.text][i] for i, _ in kept],
            pairs,
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=False,
            return_token_type_ids=self.token_types,
        )
        for position, (i, label) in enumerate(kept):
            types = encoded["token_type_ids"][position] if self.token_types else None
            texts = (rows[self.text][i], rows[self.pair][i]) if self.pair else (rows[self.text][i],)
            whole = whole_length(encoded, position, self.max_length, self.tokenizer, *texts)
            out.add(first + i, encoded["input_ids"][position], label=label, token_types=types, whole=whole)

    def _label(self, rows: dict[str, list], i: int) -> Any:
        if not isinstance(self.label, str):
            values = [rows[name][i] for name in self.label]
            return None if any(v is None for v in values) else values
        value = rows[self.label][i]
        return named(value, self.class_names)


def ask_for_segments(tokenizer: Any) -> None:
    """Makes a tokenizer give token types unasked, and keep that when it is saved. A model that learned from them is
    asked by others through its tokenizer, and some (ALBERT's, generic ones) make none by default."""
    if "token_type_ids" not in tokenizer.model_input_names:
        names = [*tokenizer.model_input_names, "token_type_ids"]
        tokenizer.model_input_names = names
        tokenizer.init_kwargs["model_input_names"] = names  # what save_pretrained writes


def cut_where_training_did(tokenizer: Any, max_length: int) -> None:
    """Makes a tokenizer that is asked to cut (`truncation=True`) cut there, and keep that when it is saved: a stock
    pipeline would read more of a long text than the model was ever trained or measured on."""
    tokenizer.model_max_length = max_length
    tokenizer.init_kwargs["model_max_length"] = max_length  # what save_pretrained writes


def named(value: Any, class_names: tuple[str, ...] | None) -> Any:
    """A class id (or a list of them) under its name, where the dataset has names of its own."""
    if class_names is None:
        return value
    if isinstance(value, list):
        return [named(v, class_names) for v in value]
    if isinstance(value, int) and 0 <= value < len(class_names):
        return class_names[value]
    return value


@dataclass(frozen=True)
class TokenClassifier:
    """Lists of words, each word with a tag."""

    tokenizer: Any
    tokens: str
    tags: str
    labels: LabelMap
    max_length: int
    token_types: bool
    class_names: tuple[str, ...] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.tokens, self.tags)

    def encode(self, rows: dict[str, list], first: int, out: SampleWriter) -> None:
        kept: list[tuple[int, list[int]]] = []
        for i, (words, tags) in enumerate(zip(rows[self.tokens], rows[self.tags])):
            try:
                kept.append((i, self._tags(words, tags)))
            except BadLabel as error:
                out.reject(first + i, str(error))
        if not kept:
            return
        encoded = self.tokenizer(
            [rows[self.tokens][i] for i, _ in kept],
            is_split_into_words=True,
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=False,
            return_token_type_ids=self.token_types,
        )
        for position, (i, tags) in enumerate(kept):
            pieces = word_numbers(encoded, position, self.tokenizer, rows[self.tokens][i])
            labels = first_pieces(pieces, tags)
            if all(label == IGNORE for label in labels):
                out.reject(first + i, f"no labelled word is left within max_length {self.max_length}")
                continue
            types = encoded["token_type_ids"][position] if self.token_types else None
            ids, words = encoded["input_ids"][position], rows[self.tokens][i]
            whole = whole_length(encoded, position, self.max_length, self.tokenizer, words, is_split_into_words=True)
            out.add(first + i, ids, token_labels=labels, token_types=types, whole=whole)
            out.lost_tags += _without_pieces(pieces, tags, cut=whole > len(ids))

    def _tags(self, words: Any, tags: Any) -> list[int]:
        if not words:
            raise BadLabel("the row has no words")
        if tags is None:
            raise BadLabel("the tags are missing")
        if len(words) != len(tags):
            raise BadLabel(f"the row has {len(words)} words but {len(tags)} tags")
        if any(not isinstance(word, str) for word in words):
            raise BadLabel("a word is missing")
        return [IGNORE if tag == IGNORE else self.labels.class_id(named(tag, self.class_names)) for tag in tags]


def first_pieces(word_ids: list[int | None], tags: list[int]) -> list[int]:
    """Each word's tag on its first piece, IGNORE elsewhere."""
    labels, previous = [], None
    for word in word_ids:
        labels.append(tags[word] if word is not None and word != previous else IGNORE)
        previous = word
    return labels


def _without_pieces(word_ids: list[int | None], tags: list[int], cut: bool) -> int:
    """How many words with a tag have no token at all: they are empty, or of characters that the tokenizer drops. What
    was cut off at either end is counted as such, and not here."""
    seen = {word for word in word_ids if word is not None}
    inside = range(min(seen), max(seen) + 1) if cut else range(len(tags))
    return sum(word not in seen and tags[word] != IGNORE for word in inside)


def for_words(tokenizer: Any) -> Any:
    """The tokenizer as lists of words need it. Byte-level BPE writes a word with the space before it, and would glue
    words together that come without: a copy is told to put the space there, and to keep that when it is saved."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or '"ByteLevel"' not in str(getattr(backend.pre_tokenizer, "__getstate__", lambda: b"")()):
        return tokenizer
    from tokenizers import Tokenizer

    description = json.loads(backend.to_str())
    before, behind = description["pre_tokenizer"], description["post_processor"] or {}
    for part in [before, *before.get("pretokenizers", ()), behind, *behind.get("processors", ())]:
        if part.get("type") in ("ByteLevel", "RobertaProcessing"):  # the latter knows where a word's offsets begin
            part["add_prefix_space"] = True
    spaced = copy.deepcopy(tokenizer)
    spaced._tokenizer = Tokenizer.from_str(json.dumps(description))
    spaced.add_prefix_space = True
    spaced.init_kwargs["add_prefix_space"] = True  # what save_pretrained writes
    return spaced
