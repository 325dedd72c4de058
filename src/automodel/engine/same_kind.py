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


def check_kind(
    dataset: DatasetConfig, layout: Mapping[str, Any] | None, data: PreparedData, validation: DatasetConfig
) -> None:
    """`layout`: how the training data were read (`PreparedData.layout`). Raises `UserError`."""
    if dataset.mixture or validation.mixture or validation.text_column or not validation.answers_only:
        return  # one of several may be plain text as well; or every word is meant
    trained, found = layout or {}, data.layout or {}
    kind = trained.get("kind")
    if kind not in COLUMNS or found.get("kind") != "plain text":
        return
    roles = {**trained.get("prompt", {}), "answer": trained.get("answer")}
    wanted = COLUMNS[kind].format(roles=", ".join(f"{role}: {column}" for role, column in roles.items()))
    raise UserError(
        f"validation_dataset: its rows were read as plain text (column '{found['text']}'), every word of which would "
        f"count, while the training data are {kind}, of which the answers do. Name its columns "
        f"(validation_dataset.{wanted}), or say that plain text is meant (validation_dataset.text_column: "
        f"{found['text']})."
    )
