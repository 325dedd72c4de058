"""SQuAD's answers as CSV files have them.

A CSV cell holds text, so the record `{"text": [...], "answer_start": [...]}` arrives as whatever the writing program
made of it: JSON, Python's notation, or that of numpy arrays (`datasets.Dataset.to_csv`). Learned as it stands, a model
would answer with brackets and `dtype=object`. Only records that have `answer_start` are read: other answers may well be
meant as JSON.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_ARRAY = re.compile(r"array\((\[.*?\])(?:,\s*dtype=\w+)?\)", re.DOTALL)


def read_answer(cell: str) -> Any:
    """The record that a text is, or the text itself."""
    if not (cell.lstrip().startswith("{") and "answer_start" in cell):
        return cell
    for read in (json.loads, ast.literal_eval, lambda text: ast.literal_eval(_ARRAY.sub(r"\1", text))):
        try:
            record = read(cell)
        except (ValueError, SyntaxError):
            continue
        if isinstance(record, dict) and "text" in record:
            return record
    return cell
