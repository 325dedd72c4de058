"""Finding the columns a task needs.

A column named in the config must exist; one left out is found by the names that public datasets use. Whatever cannot
be found is an error that lists the columns there are, with the nearest name: most such errors are typing mistakes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from automodel.config.errors import UserError
from automodel.data.problems import Problems

MOST_LISTED = 20  # columns that a message lists
TEXT = (
    "text",
    "sentence",
    "review",
    "content",
    "comment",
    "tweet",
    "body",
    "document",
    "article",
    "utterance",
    "query",
)
TEXT_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("question", "sentence"),
    ("query", "passage"),
)
LABEL = ("label", "labels", "target", "class", "category", "sentiment", "intent", "topic", "score", "stars", "rating")
TOKENS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "labels", "pos_tags", "chunk_tags", "label")
PROMPT_MESSAGES = ("prompt", "completion")  # messages asked, and messages answered
TOOLS = ("tools", "functions")  # what the assistant may call; OpenAI's files had the second name
MESSAGES = ("messages", "conversations", "conversation", "chat", "dialogue")
SOURCE_TARGET = (
    ("document", "summary"),
    ("article", "highlights"),
    ("article", "summary"),
    ("text", "summary"),
    ("dialogue", "summary"),
    ("source", "target"),
    ("src", "tgt"),
    ("input", "output"),
    ("input_text", "target_text"),
    ("question", "answer"),
)
LANGUAGE_COLUMNS = (
    ".text_column: <column> for plain text, messages_column: <column> for chats, or "
    "column_mapping: {question: <column>, answer: <column>}."
)


@dataclass(frozen=True)
class Columns:
    """The columns of a dataset, asked for by one section of the config (`dataset` or `validation_dataset`)."""

    features: Any
    """`datasets.Features`."""
    section: str = "dataset"

    def __contains__(self, name: str) -> bool:
        return name in self.features

    @property
    def names(self) -> list[str]:
        return list(self.features)

    def listed(self) -> str:
        shown = list(self.features.items())[:MOST_LISTED]
        rest = f", … ({len(self.features) - len(shown)} more)" if len(shown) < len(self.features) else ""
        return ", ".join(f"{shortened(name)} ({kind_of(feature)})" for name, feature in shown) + rest

    def required(self, name: str, key: str) -> str:
        """A column the config names under `key`."""
        if name in self.features:
            return name
        raise UserError(
            f"{self.section}.{key}: the data has no column '{name}'. It has: {self.listed()}."
            + did_you_mean(name, self.names)
        )

    def all_required(self, names: Iterable[str], key: str) -> None:
        """Columns the config names under `key`, what is missing at once."""
        problems = Problems()
        for name in names:
            with problems.collecting():
                self.required(name, key)
        problems.raise_if_any()

    def first_of(self, names: Iterable[str], key: str, what: str, ways: str = "") -> str:
        """The first known name that the data has."""
        for name in names:
            if name in self.features:
                return name
        raise UserError(
            f"{self.section}.{key}: no column of the data is known to hold {what}. It has: {self.listed()}. "
            + (ways or f"Name the right one: {self.section}.{key}: <column>.")
        )

    def text(
        self,
        configured: str | None,
        key: str,
        names: Sequence[str],
        what: str,
        besides: Sequence[str] = (),
        ways: str = "",
    ) -> str:
        """A column of strings: the configured one, a known name, or the only column of strings there is."""
        if configured is not None:
            return self.of_strings(self.required(configured, key), key)
        known = [n for n in names if n in self.features and is_string(self.features[n]) and n not in besides]
        if known:
            return known[0]
        mixed = next((n for n in names if n in self.features and is_mixed(self.features[n])), None)
        if mixed is not None:
            raise UserError(
                f"{self.section}.{key}: column '{mixed}' holds {kind_of(self.features[mixed])}: text in some rows, "
                "numbers or lists in others. Write text in every row."
            )
        strings = [n for n, f in self.features.items() if is_string(f) and n not in besides]
        if len(strings) == 1:
            return strings[0]
        return self.first_of((), key, what, ways)

    def not_all_empty(self, rows: Any, name: str, key: str) -> None:
        """Asked before the labels are looked at: of a file without texts that is the first thing to say."""
        if not any(text and not text.isspace() for text in rows[name]):
            raise UserError(
                f"{self.section}.{key}: column '{name}' is empty in all {len(rows):,} rows. Name the column that holds "
                f"the texts; the data has: {self.listed()}."
            )

    def of_strings(self, name: str, key: str) -> str:
        if not is_string(self.features[name]):
            strings = [n for n, f in self.features.items() if is_string(f)]
            hint = f" Columns of text here: {', '.join(strings)}." if strings else " No column here holds text."
            raise UserError(
                f"{self.section}.{key}: column '{name}' holds {kind_of(self.features[name])}, not text.{hint}"
            )
        return name


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def shortened(name: str) -> str:
    """A column's name as it can be shown: that of a file without a header may be a whole text."""
    return name if len(name) <= 40 else f"{name[:37]}…"


def is_string(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string") and type(feature).__name__ == "Value"


def is_flag(feature: Any) -> bool:
    """Whether all that the column has is numbers, true and false, or nothing."""
    return str(getattr(feature, "dtype", None)).startswith(("null", "bool", "int", "uint", "float"))


def is_mixed(feature: Any) -> bool:
    """Whether rows of a JSON file have values of different kinds in the column; `datasets` keeps those as JSON."""
    return type(feature).__name__ == "Json"


def is_list(feature: Any) -> bool:
    return isinstance(feature, list) or type(feature).__name__ in ("List", "LargeList", "Sequence")


def item_of(feature: Any) -> Any:
    """Feature of a list's items."""
    return feature[0] if isinstance(feature, list) else feature.feature


def kind_of(feature: Any) -> str:
    """A feature in words a person knows."""
    if isinstance(feature, dict):
        return "a record of " + "/".join(feature)
    if is_list(feature):
        inner = item_of(feature)
        return "lists of records" if isinstance(inner, dict) else f"lists of {kind_of(inner)}"
    if is_mixed(feature):
        return "values of different kinds"
    if type(feature).__name__ == "ClassLabel":
        return "class label"
    dtype = str(getattr(feature, "dtype", type(feature).__name__))
    if dtype in ("string", "large_string"):
        return "text"
    if dtype == "null":
        return "empty"
    if dtype.startswith(("int", "uint")):
        return "integers"
    return "numbers" if dtype.startswith("float") else dtype


def with_columns(rows: Any, new: dict[str, Any]) -> Any:
    """The rows with some columns replaced by arrays of pyarrow, all at once: a table may have thousands of columns."""
    if not new:
        return rows
    import datasets
    import pyarrow as pa

    order = rows.column_names
    kept = [rows.remove_columns(list(new))] if len(new) < len(order) else []
    made = datasets.Dataset(pa.table(new))
    return datasets.concatenate_datasets([*kept, made], axis=1).select_columns(order)
