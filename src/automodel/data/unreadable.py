"""Why `datasets` could not read files, in words that name the file, the line or the column."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from automodel.config.json_text import parse_json
from automodel.data.cells import in_words, open_text
from automodel.data.json_faults import bad_lines

LOOKED_AT = 1000  # rows of a JSON file whose keys are taken for its columns


def unreadable(
    files: list[Path],
    paths: list[Path],
    format: str,
    error: Exception,
    section: str,
    column_names: Sequence[str] | None = None,
) -> str:
    """`paths`: what was read, which for nested JSON is not the files themselves. `column_names`: those that the config
    gives."""
    named = f"'{files[0]}'" if len(files) == 1 else f"{len(files)} files, the first of them '{files[0]}',"
    cause: BaseException = error
    while cause.__cause__ is not None and cause.__cause__ is not cause:
        cause = cause.__cause__
    if format == "json":
        for path in paths:
            if place := bad_lines(path):
                return f"{section}.path: '{path}' is not valid JSON lines: {place}"
    if len(paths) > 1 and not column_names and (difference := different_columns(paths, format)):
        return f"{section}.path: {difference}"
    header = list(column_names or _columns_of(files[0], format)) if format in ("csv", "tsv") else None
    said = _first_line(cause)
    reason = in_words(said, header, named=column_names is not None)
    fix = " Write it again, or name another file." if reason == said else ""  # our own words say what to do
    return f"{section}.path: {named} cannot be read as {format.upper()}: {reason}.{fix}"


def different_columns(files: list[Path], format: str) -> str | None:
    """The first file whose columns are not those of the first one, in words."""
    if format not in ("csv", "tsv", "json"):
        return None
    first = _columns_of(files[0], format)
    for file in files[1:]:
        found = _columns_of(file, format)
        for more, less, names in ((file, files[0], found), (files[0], file, first)):
            other = first if more is file else found
            name = next((name for name in names if name not in other), None)
            if name is not None:
                return (
                    f"'{more}' has a column '{name}' that '{less}' does not have. Give all files the same columns, or "
                    "choose files with data_files."
                )
    return None


def _columns_of(path: Path, format: str) -> list[str]:
    """Names in a file's header, or in its first rows."""
    with open_text(path) as file:
        if format != "json":
            return next(csv.reader(file, delimiter="\t" if format == "tsv" else ","), [])
        lines = [line for line in islice(file, LOOKED_AT) if line.startswith("{")]
    try:
        return list(dict.fromkeys(name for line in lines for name in parse_json(line)))
    except ValueError:  # an array, or one that is broken
        return []


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
