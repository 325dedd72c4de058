"""What is wrong with JSON files, by line or row: parsers name the first place, or none.

A key that stands twice in an object is no error to most parsers: the last one wins, without a word. Arrow refuses it,
and counts rows from the beginning of a block when it says where.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.config.json_text import TOO_DEEP, may_be_deep, parse_json
from automodel.data.cells import open_text

MOST_NAMED = 5
_HALF = re.compile(r"[\ud800-\udfff]")


class Twice(dict):
    """An object with a key that stands in it twice."""

    key: str


def with_repeats(pairs: list[tuple[str, Any]]) -> dict:
    """For `json`'s `object_pairs_hook`: the object as ever, marked where a key stands in it twice."""
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    names = [name for name, _ in pairs]
    marked = Twice(made)
    marked.key = next(name for name in names if names.count(name) > 1)
    return marked


def bad_lines(path: Path) -> str | None:
    """The lines of a file of JSON lines that are none, in words."""
    found = [f"line {number}{fault}" for number, _, fault in _lines(path) if fault]
    if not found:
        return None
    more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    fix = "Put it right, or take the line out." if len(found) == 1 else "Put them right, or take the lines out."
    return f"{'; '.join(found[:MOST_NAMED])}{more}. {fix}"


def check_depth(path: Path, section: str) -> None:
    """Raises `UserError` for JSON that no parser below reads: Arrow's goes one call deeper for every bracket, and ends
    the process where the stack ends."""
    with open_text(path) as file:
        for number, text in enumerate(file if _is_lines(path) else [file.read()], start=1):
            if not may_be_deep(text):
                continue
            try:
                parse_json(text)
            except json.JSONDecodeError as error:
                if error.msg == TOO_DEEP:
                    where = f"line {number}: " if number > 1 or text.endswith("\n") else ""
                    raise UserError(
                        f"{section}.path: '{path}': {where}{TOO_DEEP}. Take it out, or write it as a text."
                    ) from None


def records(path: Path) -> Iterator[Any]:
    """The rows of a JSON file as Python reads them: lines, or an array. None where only others can read it."""
    if _is_lines(path):
        yield from (value for _, value, _ in _lines(path))
        return
    with open_text(path) as file, suppress(ValueError):
        content = parse_json(file.read(), object_pairs_hook=with_repeats)
        yield from content if isinstance(content, list) else [content]


def repeated_keys(path: Path) -> str | None:
    """The rows of a JSON file that have a key twice, in words."""
    return in_rows(records(path))


def in_rows(rows: Any) -> str | None:
    """The rows that have a key twice."""
    found = [(row, key) for row, value in enumerate(rows) if (key := _repeated(value)) is not None]
    if not found:
        return None
    row, key = found[0]
    others = ", ".join(str(row) for row, _ in found[1:MOST_NAMED])
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    also = f" (so have rows {others}{more} some key)" if others else ""
    return (
        f"row {row} has the key '{key}' twice{also}, and only one of the values would be learned. Keep the right one."
    )


def _is_lines(path: Path) -> bool:
    with open_text(path) as file:
        first = next((line for line in file if line.strip()), "")
    try:
        return isinstance(parse_json(first), dict)
    except ValueError:
        return False


def _lines(path: Path) -> Iterator[tuple[int, Any, str]]:
    """Number, value and fault of each line; an array has no lines."""
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.lstrip().startswith("["):
                return
            if line.strip():
                yield number, *_read(line.rstrip("\r\n"))


def _read(line: str) -> tuple[Any, str]:
    try:
        value = parse_json(line, object_pairs_hook=with_repeats)
    except json.JSONDecodeError as error:
        return None, f", column {error.colno}: {error.msg}"
    if not isinstance(value, dict):
        return value, f" is {type(value).__name__} and not an object of columns"
    if (key := _repeated(value)) is not None:
        return value, f" has the key '{key}' twice"
    half = _HALF.search(json.dumps(value, ensure_ascii=False)) if "\\u" in line else None
    if half:
        return value, f" holds half of a letter that is written as two (\\u{ord(half[0]):04x})"
    return value, ""


def _repeated(value: Any) -> str | None:
    """The first key that stands twice in an object, or in one inside it."""
    if isinstance(value, Twice):
        return value.key
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((key for part in inner if (key := _repeated(part)) is not None), None)
