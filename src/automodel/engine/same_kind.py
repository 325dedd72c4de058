"""Held-out data that would be measured otherwise than the model is trained.

Columns are found by their names. A file whose names are not among those of questions and answers is plain text, and a
model that learns answers would be judged by every word of its rows: a loss that looks like any other, and may choose
the best checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig
from automodel.data.prepare import PreparedData

COLUMNS = {
    "instructions": "column_mapping: {{{roles}}}, with its own names behind the colons",
    "chats": "messages_column",
}


def check_kind(trained: Mapping[str, Any] | None, data: PreparedData, section: DatasetConfig, name: str) -> None:
    """`trained`: how the training data were read (`PreparedData.layout`). Raises `UserError`."""
    found = data.layout or {}
    kind = (trained or {}).get("kind")
    meant = section.text_column is not None or section.mixture is not None or not section.answer_only_loss
    if meant or kind not in COLUMNS or found.get("kind") != "plain text":
        return
    assert trained is not None
    roles = {**trained.get("prompt", {}), "answer": trained.get("answer")}
    wanted = COLUMNS[kind].format(roles=", ".join(f"{role}: {column}" for role, column in roles.items()))
    raise UserError(
        f"{name}: its rows were read as plain text (column '{found['text']}'), every word of which would count, while "
        f"the training data are {kind}, of which the answers do. Name its columns ({name}.{wanted}), or say that plain "
        f"text is meant ({name}.text_column: {found['text']})."
    )
