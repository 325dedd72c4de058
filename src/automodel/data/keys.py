"""Which keys of `dataset:` mean something: to a task, and to the kind of rows that were found.

A key of another task is refused: whoever sets `source_prefix` for a causal LM believes that texts get a prefix. A key
of another kind of rows (chats, prompts with answers, plain text) is noted: several datasets may share a file that has
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any

from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig
from automodel.data.problems import Problems

OF_CHATS = frozenset({"messages_column", "chat_template", "answer_only_loss"})
OF_INSTRUCTIONS = frozenset({"column_mapping", "prompt_template", "chat_template", "answer_only_loss"})
OF_PLAIN_TEXT = frozenset({"text_column"})

OF_TASKS: dict[str, tuple[str, ...]] = {
    "text-classification": (
        "text_column", "text_pair_column", "label_column", "label_columns", "labels", "column_mapping",
    ),
    "token-classification": ("tokens_column", "label_column", "labels", "column_mapping"),
    "causal-lm": (
        "text_column", "messages_column", "column_mapping", "chat_template", "prompt_template", "target_column",
        "answer_only_loss",
    ),
    "seq2seq": (
        "source_column", "target_column", "column_mapping", "source_prefix", "source_lang", "target_lang",
        "max_target_length",
    ),
}  # fmt: skip
"""Keys that say what a row is; all others hold for every task."""

OF_READY_ROWS = frozenset({"label_column", "labels", "max_target_length"})


def check_keys(task: str, dataset: DatasetConfig, validation: DatasetConfig | None) -> None:
    """Raises `UserError` with every key that is set and belongs to other tasks."""
    problems = Problems()
    for where, section in (("dataset", dataset), ("validation_dataset", validation)):
        if section is None:
            continue
        entries = [(f"{where}.mixture.{n}", entry) for n, entry in enumerate(section.mixture or ())]
        for place, own in [(where, section), *entries]:
            for key in keys_set(own):
                tasks = [name for name, keys in OF_TASKS.items() if key in keys]
                if task not in tasks:
                    problems.found.append(UserError(_foreign(f"{place}.{key}", task, tasks)))
    problems.raise_if_any()


def _foreign(key: str, task: str, tasks: Sequence[str]) -> str:
    instead = f"set `task: {tasks[0]}`" if len(tasks) == 1 else f"set `task:` to {' or '.join(tasks)}"
    return f"{key}: {task} has no use for it; its keys are {', '.join(OF_TASKS[task])}. Remove it, or {instead}."


def keys_set(section: Any) -> list[str]:
    """Keys of a section, or of an entry of a mixture, that say what a row is and are not left at their defaults."""
    told = {key for keys in OF_TASKS.values() for key in keys}
    return [f.name for f in fields(section) if f.name in told and getattr(section, f.name) not in (None, f.default)]


def unused(section: str, cfg: DatasetConfig, used: Sequence[Collection[str]], description: str) -> Iterable[str]:
    """Notes on keys that nothing was read by. `used`: keys that mean something to the rows of each of the datasets;
    empty: nobody knows any more (a store of an earlier release)."""
    if not used:
        return
    for key in keys_set(cfg):
        if not any(key in keys for keys in used):
            yield f"{section}.{key} is not used: these rows are {description}"
    for number, (entry, keys) in enumerate(zip(cfg.mixture or (), used)):
        for key in keys_set(entry):
            if key not in keys:
                yield f"{section}.mixture.{number}.{key} is not used: these rows are {description}"
