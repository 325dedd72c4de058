"""Which keys of `dataset:` mean something: to the row format of a task, and to the kind of rows that were found.

A key of another task is refused: whoever sets `source_prefix` for a causal LM believes that texts get a prefix. A key
of another kind of rows (chats, prompts with answers, plain text) is noted: several datasets may share a file that has
it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from automodel.config.errors import Problem, UserError
from automodel.data.config import WHERE_NOBODY_SAYS, DatasetConfig
from automodel.data.problems import Problems
from automodel.data.row_format import RowFormat

OF_CHATS = frozenset({"messages_column", "chat_template", "answer_only_loss"})
OF_INSTRUCTIONS = frozenset({"column_mapping", "prompt_template", "chat_template", "answer_only_loss"})
OF_PLAIN_TEXT = frozenset({"text_column"})

OF_READY_ROWS = frozenset({"label_column", "labels", "max_target_length"})

OF_LABELLED_TEXTS = ("text_column", "text_pair_column", "label_column", "label_columns", "labels", "column_mapping")
OF_TAGGED_WORDS = ("tokens_column", "label_column", "labels", "column_mapping")
OF_LANGUAGE = (
    "text_column", "messages_column", "column_mapping", "chat_template", "prompt_template", "target_column",
    "answer_only_loss",
)  # fmt: skip
OF_SOURCES_AND_TARGETS = (
    "source_column", "target_column", "column_mapping", "source_prefix", "source_lang", "target_lang",
    "max_target_length",
)  # fmt: skip
OF_ROWS = frozenset({*OF_LABELLED_TEXTS, *OF_TAGGED_WORDS, *OF_LANGUAGE, *OF_SOURCES_AND_TARGETS})
"""Keys that say what a row is; all other keys hold for every row format."""

ROLES_OF_LABELLED_TEXTS = {"text": "text_column", "text_pair": "text_pair_column", "label": "label_column"}
ROLES_OF_TAGGED_WORDS = {"tokens": "tokens_column", "tags": "label_column", "labels": "label_column"}
ROLES_OF_SOURCES_AND_TARGETS = {"source": "source_column", "target": "target_column"}
KEYS_OF_ROLES = {**ROLES_OF_LABELLED_TEXTS, **ROLES_OF_TAGGED_WORDS, **ROLES_OF_SOURCES_AND_TARGETS}
"""Roles of `column_mapping`, in the formats that have a key of their own for each column."""


def foreign_keys(
    own: RowFormat,
    formats: Sequence[RowFormat],
    section: DatasetConfig | None,
    where: str,
    taken: Collection[str] = (),
) -> Iterator[Problem]:
    """Keys that are set and belong to other row formats than `own`. `formats`: those of all tasks. `taken`: keys that
    the dataset's own maker asks for."""
    if section is None:
        return
    entries = [(f"{where}.mixture.{n}", entry) for n, entry in enumerate(section.mixture or ())]
    for place, part in [(where, section), *entries]:
        for key in keys_set(part):
            if key not in own.keys and key not in taken:
                yield Problem(f"{place}.{key}", _foreign(own, [other.task for other in formats if key in other.keys]))


def _foreign(own: RowFormat, tasks: Sequence[str]) -> str:
    instead = f"set `task: {tasks[0]}`" if len(tasks) == 1 else f"set `task:` to {' or '.join(tasks)}"
    return f"{own.task} has no use for it; its keys are {', '.join(own.keys)}. Remove it, or {instead}."


def check_keys(
    own: RowFormat,
    formats: Sequence[RowFormat],
    section: DatasetConfig | None,
    where: str,
    maker: Callable[..., Any] | None = None,
) -> None:
    """Raises `UserError` with every key of a section that belongs to other row formats."""
    problems = Problems()
    for found in foreign_keys(own, formats, section, where, keys_taken(maker)):
        problems.found.append(UserError(f"{found.path}: {found.message}"))
    problems.raise_if_any()


def keys_taken(maker: Callable[..., Any] | None) -> frozenset[str]:
    """Keys that a class or function of the user's has parameters for: they are handed to it."""
    return frozenset() if maker is None else frozenset(inspect.signature(maker).parameters)


def keys_set(section: Any) -> list[str]:
    """Keys of a section, or of an entry of a mixture, that say what a row is and are not left at their defaults.
    Earlier versions wrote the default of `answer_only_loss` into every run's config."""
    given = {f.name: getattr(section, f.name) for f in fields(section) if f.name in OF_ROWS}
    return [key for key, value in given.items() if value is not None and value != WHERE_NOBODY_SAYS.get(key)]


def unused(
    section: str, cfg: DatasetConfig, kinds: Sequence[Mapping[str, Any]], taken: Collection[str]
) -> Iterator[str]:
    """Notes on keys that nothing was read by. `kinds`: of the rows of each of the datasets, what they are and which
    keys mean something to them; empty: nobody knows any more (a store of an earlier release)."""
    if not kinds:
        return
    what = "; ".join(dict.fromkeys(kind["rows"] for kind in kinds))
    for key in keys_set(cfg):
        if key not in taken and not any(key in kind["keys"] for kind in kinds):
            yield f"{section}.{key} is not used: these rows are {what}"
    for number, (entry, kind) in enumerate(zip(cfg.mixture or (), kinds)):
        for key in keys_set(entry):
            if key not in kind["keys"]:
                yield f"{section}.mixture.{number}.{key} is not used: these rows are {kind['rows']}"
