"""The tokenizer as it is saved with a model: whoever loads it reads texts as training did."""

from __future__ import annotations

from typing import Any

from automodel.data.classify import ask_for_segments, cut_where_training_did, for_words
from automodel.data.config import DatasetConfig
from automodel.data.prepare import choose_max_length
from automodel.data.row_format import RowFormat


def as_training_read(
    tokenizer: Any, row_format: RowFormat, cfg: DatasetConfig, positions: int | None, *, segments: bool, longest: int
) -> Any:
    """`segments`: whether the data had token types. `longest`: of its samples; rows that came as tokens may be longer
    than the config's limit."""
    if segments:
        ask_for_segments(tokenizer)
    if row_format.labels == "document":
        cut_where_training_did(tokenizer, max(choose_max_length(cfg, row_format, positions)[0], longest))
    return for_words(tokenizer) if row_format.labels == "token" else tokenizer
