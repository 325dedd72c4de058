"""JSON from outside, read without end of Python's stack: `json` goes one call deeper for every bracket."""

from __future__ import annotations

import json
from typing import Any

MOST_LEVELS = 60  # of objects and lists inside each other; Arrow takes 64
TOO_DEEP = f"objects and lists lie inside each other more than {MOST_LEVELS} times"


def parse_json(text: str | bytes, **options: Any) -> Any:
    """As `json.loads`. Text that is too deep raises `JSONDecodeError`, as text that is no JSON does."""
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise _too_deep(text) from None
    if may_be_deep(text) and _is_deep(value):
        raise _too_deep(text)
    return value


def may_be_deep(text: str | bytes) -> bool:
    """Whether there are enough brackets for that, wherever they stand. Counting them costs next to nothing."""
    if isinstance(text, str):
        return text.count("[") + text.count("{") > MOST_LEVELS
    return text.count(b"[") + text.count(b"{") > MOST_LEVELS


def _too_deep(text: str | bytes) -> json.JSONDecodeError:
    return json.JSONDecodeError(TOO_DEEP, text if isinstance(text, str) else "", 0)


def _is_deep(value: Any) -> bool:
    level, depth = [value], 0
    while level and depth <= MOST_LEVELS:
        depth += any(isinstance(outer, dict | list) for outer in level)
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth > MOST_LEVELS
