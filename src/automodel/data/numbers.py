"""Which columns of a CSV file are numbers.

A cell is text: `00501` is a postal code and `72` an answer, and reading them as numbers would teach `501` and `72.0`.
So every cell is kept as it is written, and only where labels are looked for is a column taken for numbers: a whole
column, never the part of it that a parser happened to see.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from automodel.data.columns import is_string, with_columns
from automodel.data.files import quiet

GAPS = {"na", "n/a", "nan", "null", "none", "-"}
"""Words for a missing value, where every other cell of the column is a number."""
TRUTHS = {"true", "false"}
WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})")
DECIMAL = re.compile(r"[+-]?(([0-9]+\.[0-9]*|\.[0-9]+|[0-9]{1,18})(e[+-]?[0-9]+)?|inf|infinity)")
A_NAME = re.compile(r"[+-]?0[0-9]")  # 007
FIRST = 200  # rows that mostly tell already that a column is text


def with_numbers(rows: Any, besides: Sequence[str | None] = ()) -> Any:
    """The same rows with columns of numbers, and of true and false, as what they are; not those in `besides`."""
    import datasets

    with quiet(datasets):  # it would show how it puts a part of a file together
        table = rows.with_format("arrow")[:]
        texts = [name for name, feature in rows.features.items() if name not in besides and is_string(feature)]
        found = {name: _numbers(table.column(name)) for name in texts}
        return with_columns(rows, {name: values for name, values in found.items() if values is not None})


def _numbers(column: Any) -> Any:
    """The column as integers, decimals or booleans; None where it is text, or empty."""
    import pyarrow as pa

    first = column.slice(0, FIRST).to_pylist()
    if any(_is_text(cell.strip().lower()) for cell in first if cell is not None):
        return None
    cells = column.cast(pa.large_string()).combine_chunks().dictionary_encode()
    values = _read([cell.strip().lower() for cell in cells.dictionary.to_pylist()])
    return None if values is None else pa.array(values).take(cells.indices)


def _is_text(cell: str) -> bool:
    return cell not in GAPS and cell not in TRUTHS and not _is_number(cell)


def _is_number(cell: str) -> bool:
    return DECIMAL.fullmatch(cell) is not None and A_NAME.match(cell) is None


def _read(cells: list[str]) -> list[Any] | None:
    """What different cells of a column stand for; None where they are text."""
    if cells and set(cells) <= TRUTHS:
        return [cell == "true" for cell in cells]
    given = [cell for cell in cells if cell not in GAPS]
    if not given or not all(map(_is_number, given)):
        return None
    read = int if all(WHOLE.fullmatch(cell) for cell in given) else float
    return [None if cell in GAPS else read(cell) for cell in cells]
