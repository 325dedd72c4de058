"""The first row of a CSV or TSV file: names of columns, or, in a file without a header, a row like all others.

pandas takes any first row for names. One that looks like data is refused, unless the config or the names themselves say
that it is a header: a file's first text would become the name of a column, and never be learned.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.data import columns as known
from automodel.data.config import DatasetConfig
from automodel.data.packed import PackedError, opened
from automodel.data.prompt_template import places_of

COMPARED = 100  # rows
WORDS_OF_A_TEXT = 4
OTHER_NAMES = ("id", "idx", "index", "context", "instruction", "response", "completion", "prompt", "output", "name")
NAMES = {
    *known.TEXT, *known.LABEL, *known.TOKENS, *known.TAGS, *known.MESSAGES, *known.TOOLS, *OTHER_NAMES,
    *chain.from_iterable(known.TEXT_PAIRS), *chain.from_iterable(known.SOURCE_TARGET),
}  # fmt: skip
"""Names that columns usually have."""
NAMES_TO_SHOW = ("text", "label")


def named_by_config(cfg: DatasetConfig) -> dict[str, Any]:
    """Options with which pandas reads a file without a header."""
    return {"header": None, "names": list(cfg.column_names)} if cfg.column_names else {}


def check_header(file: Path, options: dict[str, Any], section: str, cfg: DatasetConfig) -> None:
    """Raises `UserError` where a first row is no header, is one although the config names the columns, or has a name
    twice: it would mean the first column, and the other one get a name that is not in the file."""
    rows = _first_rows(file, options)
    if not rows:
        return
    first = rows[0]
    if cfg.column_names:
        _check_named(file, first, cfg.column_names, section)
        return
    names = [cell for cell in first if cell is not None]
    twice = next((name for name in names if names.count(name) > 1), None)
    if _is_data(rows, cfg):
        _refuse(file, first, section)
    if twice is not None:
        raise UserError(
            f"{section}.path: '{file}' has two columns called '{twice}'. Rename one of them, or take it out."
        )


def _first_rows(file: Path, options: dict[str, Any]) -> list[list[str | None]]:
    """Cells as text, None where there is nothing. What is wrong with the file is said where all of it is read."""
    import pandas

    with suppress(ValueError, OSError, PackedError), opened(file) as content:
        found = pandas.read_csv(content, nrows=COMPARED + 1, header=None, dtype=str, **options)
        return [[cell if isinstance(cell, str) else None for cell in row] for row in found.itertuples(index=False)]
    return []


def _check_named(file: Path, first: list[str | None], names: tuple[str, ...], section: str) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{section}.column_names has '{twice}' twice. Give each column a name of its own.")
    if len(first) != len(names):
        raise UserError(
            f"{section}.column_names has {len(names)} names, but the rows of '{file}' have {len(first)} cells. Name "
            "every column, in the order of the file."
        )
    if first == list(names):
        raise UserError(
            f"{section}.column_names: the first row of '{file}' has these names already, so it is a header. Remove "
            "column_names."
        )


def _is_data(rows: list[list[str | None]], cfg: DatasetConfig) -> bool:
    first, others = rows[0], rows[1:]
    given = [cell.strip() for cell in first if cell is not None and cell.strip()]
    if not given or {cell.lower() for cell in given} & NAMES or {*given} & _asked_for(cfg):
        return False
    if all(len(cell.split()) >= WORDS_OF_A_TEXT for cell in given):
        return True
    for place, cell in enumerate(first):
        below = [row[place] for row in others if row[place] is not None]
        if cell is not None and below and (cell in below or all(map(_is_number, [cell, *below]))):
            return True
    return False


def _is_number(cell: str | None) -> bool:
    try:
        float(cell or "")
    except ValueError:
        return False
    return True


def _asked_for(cfg: DatasetConfig) -> set[str]:
    """Columns that the config names."""
    one = (
        cfg.text_column, cfg.text_pair_column, cfg.label_column, cfg.tokens_column, cfg.messages_column,
        cfg.source_column, cfg.target_column,
    )  # fmt: skip
    several = (cfg.label_columns or (), (cfg.column_mapping or {}).values(), places_of(cfg.prompt_template or ""))
    return {name for name in (*one, *chain.from_iterable(several)) if name}


def _refuse(file: Path, first: list[str | None], section: str) -> None:
    shown = ", ".join(known.shortened(cell or "") for cell in first[: known.MOST_LISTED])
    names = [*NAMES_TO_SHOW, *(f"column_{number}" for number in range(3, len(first) + 1))][: len(first)]
    if section.startswith("--"):
        fix = f"Write the names above it, e.g. {','.join(names)}."
    else:
        what = "all columns in their order" if len(first) > 1 else "its column"
        fix = (
            f"If the file has no header, name {what}, e.g. {section}.column_names: "
            f"[{', '.join(names)}]. If these are names, say which column is which, e.g. {section}.text_column."
        )
    raise UserError(f"{section}.path: row 1 of '{file}' ({shown}) was taken for the header, and looks like data. {fix}")
