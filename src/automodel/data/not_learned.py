"""Columns that say something about the answers which learning them as they are does not hear.

Preference data (pairs of a chosen and a rejected answer, answers marked as wanted or not) and the earlier turns of an
instruction would be read past without a word: bad answers would be learned like good ones, and questions without what
they refer to. Whoever names the columns to learn in the config has decided, and is not asked again.
"""

from __future__ import annotations

from typing import Any

from automodel.config.errors import UserError
from automodel.data.columns import Columns
from automodel.data.config import DatasetConfig

PAIR = ("chosen", "rejected")
MARKS = ("label", "kto_tag")  # as TRL and LLaMA-Factory call them
HISTORY = "history"


def what_is_not_learned(
    rows: Any, columns: Columns, cfg: DatasetConfig, named: str | None = None, history: bool = False
) -> UserError | None:
    """Why rows are not to be trained on as they are. `named`: the line that would name the columns to learn, where some
    were found; `history`: whether earlier turns may stand beside them."""
    if cfg.messages_column or cfg.column_mapping or cfg.text_column or cfg.prompt_template is not None:
        return None
    if all(name in columns for name in PAIR):
        other = f"; or name what is to be learned without them, {columns.section}.{named}" if named else ""
        return UserError(
            f"{columns.section}: the columns 'chosen' and 'rejected' are answers to compare, and nothing is learned "
            "here by comparing: answers are learned as they are. To learn the chosen ones, name them: "
            f"{columns.section}.column_mapping: {{prompt: <column>, answer: chosen}} for text, or {columns.section}."
            f"messages_column: chosen for whole conversations (single messages belong at the end of theirs){other}."
        )
    mark = next((n for n in MARKS if n in columns and getattr(columns.features[n], "dtype", "") == "bool"), None)
    if mark and named and (row := _first(rows, mark, lambda wanted: wanted is False)) is not None:
        return UserError(
            f"{columns.section}: the column '{mark}' says which answers are wanted (that of row {row} is not), and "
            "nothing here learns what to avoid: every answer would be learned as it is. Keep the rows whose "
            f"'{mark}' is true; or, to learn them all, name the columns: {columns.section}.{named}."
        )
    if history and HISTORY in columns and (row := _first(rows, HISTORY, bool)) is not None:
        return UserError(
            f"{columns.section}: the column 'history' holds earlier turns (row {row} has some), which prompts of "
            "columns have no place for. Write such rows as conversations, messages: [{role: user, content: …}, "
            "{role: assistant, content: …}, …]; or, to learn without the earlier turns, name the columns: "
            f"{columns.section}.{named}."
        )
    return None


def _first(rows: Any, column: str, found: Any) -> int | None:
    """The first row with such a value; None as well where there are only columns to look at."""
    if not hasattr(rows, "__getitem__"):
        return None
    return next((number for number, value in enumerate(rows[column]) if found(value)), None)
