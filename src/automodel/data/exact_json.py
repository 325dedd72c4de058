"""JSON files as they are written. `datasets` reads them through Arrow, which takes texts such as "2024-01-01" for dates
and gives a column one type: the argument 1 of a tool call is 1.0 where another row has 1.5. Such places are read as
JSON instead, value by value. Whole numbers of more than 64 bits, or of more than 53 beside decimals, are kept as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from automodel.data.columns import MESSAGES, PROMPT_MESSAGES, TOOLS, is_list, item_of, with_columns
from automodel.data.written_numbers import as_written as in_words

WHOLE = 2.0**53  # from here on a decimal number does not hold every whole one
WRITTEN_OUT = {*MESSAGES, *PROMPT_MESSAGES, *TOOLS}  # columns whose numbers a model learns as text


def as_written(rows: Any, read_again: Callable[[Any], Any]) -> Any:
    """The same rows; where Arrow changed some of their values, `read_again` reads them with other features."""
    import datasets

    if not hasattr(datasets, "Json"):  # before datasets 5 everything is as Arrow reads it
        return rows
    exact = {
        name: _exact(feature, name in WRITTEN_OUT and not hasattr(feature, "dtype"))
        for name, feature in rows.features.items()
    }
    if exact == dict(rows.features):
        return rows
    try:
        found = read_again(datasets.Features(exact))
    except Exception:  # a number that is no JSON number to everybody, 1e400: as Arrow reads it
        return rows
    dates = [name for name, feature in rows.features.items() if _is_date(feature)]
    if not dates:
        return found
    text = datasets.Features({**found.features, **{name: datasets.Value("string") for name in dates}})
    return found.map(_read, batched=True, fn_kwargs={"names": dates}, features=text)


def _exact(feature: Any, written_out: bool) -> Any:
    """The feature with JSON in the place of what Arrow would change."""
    import datasets

    if isinstance(feature, dict):
        return {name: _exact(inner, written_out) for name, inner in feature.items()}
    if is_list(feature):
        return datasets.List(_exact(item_of(feature), written_out))
    number = written_out and str(getattr(feature, "dtype", "")).startswith("float")
    return datasets.Json() if number or _is_date(feature) else feature


def with_all_digits(rows: Any, records: Callable[[], Iterable[Mapping[str, Any]]]) -> Any:
    """The same rows; columns of numbers too large for Arrow are text, from the `records` as Python reads them."""
    import pyarrow as pa

    names = [name for name in rows.column_names if _has_lost_digits(rows, name)]
    if not names:
        return rows
    texts: dict[str, list[str | None]] = {name: [] for name in names}
    for record in records():
        for name, column in texts.items():
            value = record.get(name)
            column.append(None if value is None else in_words(value))
    if any(len(column) != len(rows) for column in texts.values()):
        return rows  # Python does not read these files as `datasets` does
    return with_columns(rows, {name: pa.array(column, pa.string()) for name, column in texts.items()})


def _has_lost_digits(rows: Any, name: str) -> bool:
    """Whether whole numbers of a column, beyond 64 bits or beside decimals, may not be those that are written there."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = rows.data.column(name)
    if not pa.types.is_floating(column.type):
        return False
    ends = pc.call_function("min_max", [column]).as_py()
    return ends["min"] is not None and WHOLE <= max(-ends["min"], ends["max"]) < float("inf")


def holds_json(feature: Any) -> bool:
    """Whether some place has values of several kinds."""
    if isinstance(feature, dict):
        return any(map(holds_json, feature.values()))
    return holds_json(item_of(feature)) if is_list(feature) else type(feature).__name__ == "Json"


def _is_date(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith("timestamp")


def _read(rows: Any, names: list[str]) -> dict[str, list]:
    return {name: list(rows[name]) for name in names}
