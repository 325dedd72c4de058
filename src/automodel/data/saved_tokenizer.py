"""The tokenizer as it is saved with a model: whoever loads it reads texts as training did."""

from __future__ import annotations

from typing import Any

from automodel.data.classify import ask_for_segments, cut_where_training_did, for_words
from automodel.data.config import DatasetConfig
from automodel.data.prepare import choose_max_length


def as_training_read(
    tokenizer: Any, task: str, cfg: DatasetConfig, positions: int | None, *, segments: bool, longest: int
) -> Any:
    """`segments`: whether the data had token types. `longest`: of its samples; rows that came as tokens may be longer
    than the config's limit."""
    if segments:
        ask_for_segments(tokenizer)
    if task == "text-classification":
        cut_where_training_did(tokenizer, max(choose_max_length(cfg, task, positions)[0], longest))
    return for_words(tokenizer) if task == "token-classification" else tokenizer
