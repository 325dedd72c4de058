"""Which columns of a CSV file are numbers.

A cell is text: `00501` is a postal code and `72` an answer, and reading them as numbers would teach `501` and `72.0`.
So every cell is kept as it is written, and only where labels are looked for is a column taken for numbers: a whole
column, never the part of it that a parser happened to see.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from automodel.data.columns import is_string

GAPS = {"na", "n/a", "nan", "null", "none", "-"}
"""Words for a missing value, where every other cell of the column is a number."""
WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})")
DECIMAL = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf|infinity)")
A_NAME = re.compile(r"[+-]?0[0-9]")  # 007


def with_numbers(rows: Any, besides: Sequence[str | None] = ()) -> Any:
    """The same rows with columns of numbers, and of true and false, as what they are; not those in `besides`."""
    order = rows.column_names
    for name, feature in rows.features.items():
        if name not in besides and is_string(feature) and (values := _numbers(rows, name)) is not None:
            rows = rows.remove_columns(name).add_column(name, values).select_columns(order)
    return rows


def _numbers(rows: Any, name: str) -> Any:
    """The column as integers, decimals or booleans; None where it is text, or empty."""
    import pyarrow as pa

    column = rows.select_columns([name]).with_format("arrow")[:].column(name)
    cells = column.combine_chunks().dictionary_encode()
    values = _read([cell.strip().lower() for cell in cells.dictionary.to_pylist()])
    return None if values is None else pa.array(values).take(cells.indices)


def _read(cells: list[str]) -> list[Any] | None:
    """What different cells of a column stand for; None where they are text."""
    if cells and set(cells) <= {"true", "false"}:
        return [cell == "true" for cell in cells]
    given = [cell for cell in cells if cell not in GAPS]
    if not given or not all(DECIMAL.fullmatch(cell) and not A_NAME.match(cell) for cell in given):
        return None
    read = int if all(WHOLE.fullmatch(cell) for cell in given) else float
    return [None if cell in GAPS else read(cell) for cell in cells]
