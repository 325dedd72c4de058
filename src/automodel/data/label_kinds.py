"""What a label column may hold, asked once before labels are inferred from it, and lists that are written as text.

A CSV file has no lists; they are written into a cell as JSON (`["a", "b"]`) or as Python prints them (`['a', 'b']`).
A column whose cells are all of this form holds lists, and the same reading turns each row's cell into one.
"""

from __future__ import annotations

import ast
import io
import json
import math
import tokenize
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from automodel.config.errors import UserError
from automodel.config.json_text import parse_json
from automodel.data.columns import Columns, is_list, is_mixed, is_string, item_of, kind_of
from automodel.data.config import DatasetConfig

SINGLE = "single_label_classification"
MULTI = "multi_label_classification"
REGRESSION = "regression"
LABELS = ("int", "uint", "float", "double", "decimal", "bool", "null")  # how their dtypes begin, beside text
NO_LABELS = {
    "timestamp": "dates",
    "date": "dates",
    "time": "times of day",
    "duration": "durations",
    "binary": "bytes",
    "large_binary": "bytes",
    "fixed_size_binary": "bytes",
    "array": "lists of lists",
}
CLASSES_TO_LIST = 50  # beyond so many, whole numbers are rather something measured


def check_label_feature(feature: Any, label: str, columns: Columns) -> None:
    """Raises `UserError` for a column of dates, bytes, records and the like, which are no labels."""
    word = _no_label(feature)
    if word is None and is_list(feature):
        item = item_of(feature)
        word = "lists" if is_list(item) else kind_of(item) if is_mixed(item) else _no_label(item)
        word = word and f"lists of {word}"
    if word is not None:
        raise not_labels(word, label, columns)


def _no_label(feature: Any) -> str | None:
    """What a column holds instead of labels; None where it holds labels, or lists or a mixture, to be looked into."""
    if is_list(feature) or is_mixed(feature) or is_string(feature) or type(feature).__name__ == "ClassLabel":
        return None
    if isinstance(feature, dict) or type(feature).__name__.startswith("Translation"):
        return "records"
    is_value = type(feature).__name__ == "Value"
    dtype = str(feature.dtype) if is_value else type(feature).__name__.lower()  # Image, Array2D, …
    if is_value and dtype.startswith(LABELS):
        return None
    return next((word for start, word in NO_LABELS.items() if dtype.startswith(start)), f"{dtype} values")


def not_labels(word: str, label: str, columns: Columns) -> UserError:
    return UserError(
        f"{columns.section}.label_column: column '{label}' holds {word}; labels are names, numbers, or lists of them. "
        f"Write them so, or name another column. Columns: {columns.listed()}."
    )


def different_kinds(rows: Any, label: str, columns: Columns) -> str:
    """Which row disagrees with the rows before it."""
    first: dict[str, str] = {}
    for number, value in enumerate(rows[label]):
        if value is not None:
            first.setdefault(type(value).__name__, f"row {number} has {value!r}")
    return (
        f"{columns.section}.label_column: column '{label}' holds values of different kinds: "
        f"{', '.join(first.values())} (rows are counted from 0). Write all labels in one way."
    )


def check_tags(rows: Any, tags: str, columns: Columns) -> None:
    """Raises `UserError` where tags are of several kinds, or are neither names nor numbers."""
    first: dict[str, str] = {}
    for number, row in enumerate(rows[tags]):
        for tag in row or ():
            if tag is None or tag == -100:
                continue
            if not isinstance(tag, str | int | float):
                raise not_labels("lists of lists or records", tags, columns)
            first.setdefault("name" if isinstance(tag, str) else "number", f"row {number} has {tag!r}")
    if len(first) > 1:
        raise UserError(
            f"{columns.section}.label_column: column '{tags}' holds tags of different kinds: "
            f"{', '.join(first.values())} (rows are counted from 0). Write all tags in one way."
        )


def is_list_text(value: Any) -> bool:
    return isinstance(value, str) and (text := value.strip()).startswith("[") and text.endswith("]")


def list_in_text(text: str) -> list[Any]:
    """The list that a text writes, as JSON or as Python does. `ValueError` where it writes none."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        pass
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError(text) from None
    # NumPy prints arrays without commas: ['a' 'b'], which Python reads as the one name 'ab'.
    skipped = (tokenize.NL, tokenize.NEWLINE)
    tokens = [t.type for t in tokenize.generate_tokens(io.StringIO(text.strip()).readline) if t.type not in skipped]
    if not isinstance(found, list) or (tokenize.STRING, tokenize.STRING) in pairwise(tokens):
        raise ValueError(text)
    return found


def lists_in_text(texts: Iterable[Any], label: str, columns: Columns) -> tuple[list[list[Any]], Any]:
    """The lists of a column of text, and the feature of their items. Rows without a label are left out."""
    from datasets import Value

    where = f"{columns.section}.label_column: column '{label}' holds lists written as text, but row"
    lists: list[list[Any]] = []
    kinds: set[type] = set()
    for row, text in enumerate(texts):
        if text is None or not text.strip():
            continue
        try:
            lists.append(list_in_text(text))
        except ValueError:
            raise UserError(
                f"{where} {row} cannot be read as one: {_shown(text)} (rows are counted from 0). Write each as JSON, "
                'e.g. ["a", "b"]; if the texts are names of classes as they stand, set model.problem_type: '
                f"{SINGLE}."
            ) from None
        kinds |= {type(item) for item in lists[-1] if item is not None}
        if kinds & {list, tuple, dict}:
            raise not_labels("lists of records" if dict in kinds else "lists of lists", label, columns)
        if not (kinds <= {str} or kinds <= {int, float, bool}):
            raise UserError(
                f"{where} {row} ({_shown(text)}) mixes names and numbers, or differs in this from the rows before it "
                "(rows are counted from 0). Write all labels in one way."
            )
    return lists, Value("string" if str in kinds else "float64" if float in kinds else "int64")


def _shown(text: str) -> str:
    text = text.strip()
    return text if len(text) <= 80 else f"{text[:77]}…"


def are_lists_as_text(rows: Any, label: str, cfg: DatasetConfig, problem_type: str | None, columns: Columns) -> bool:
    """Whether a column of text writes lists. Names in brackets remain names where the config says so."""
    values = [v for v in unique_values(rows, label) if not is_missing(v)]
    as_named = problem_type == SINGLE or (problem_type is None and all_listed(values, cfg.labels or ()))
    if as_named:
        return False
    # A broken one among lists is named with its row, and does not make names of the others.
    begun = bool(values) and all(value.lstrip().startswith("[") for value in values)
    if begun and (any(map(_writes_a_list, values)) or all(map(is_list_text, values))):
        return True
    if values and problem_type == MULTI:
        raise _no_lists(label, columns)
    return False


def _writes_a_list(text: str) -> bool:
    try:
        return is_list_text(text) and bool(list_in_text(text))
    except ValueError:
        return False


def _no_lists(label: str, columns: Columns) -> UserError:
    """For multi-label data in a column of plain text."""
    return UserError(
        f"model.problem_type is {MULTI}, but column '{label}' of {columns.section} holds text, and not a list in every "
        "row. Write lists of names: in a JSONL or Parquet file as they are, in a CSV file as "
        f'JSON text, ["a", "b"]; or name a column of 0 and 1 for each class: {columns.section}.label_columns. For one '
        "class a row, remove model.problem_type."
    )


def check_class_ids(values: Iterable[Any], label: str, cfg: DatasetConfig, columns: Columns) -> None:
    """Raises `UserError` where whole numbers go below -1, which alone stands for 'no label'."""
    if cfg.on_bad_row == "skip":  # they are bad rows, each of them
        return
    numbers = [v for v in values if not is_missing(v) and not isinstance(v, str)]
    whole = sorted({int(v) for v in numbers}) if all_whole(numbers) else []
    if not whole or whole[0] >= -1:
        return
    below = f"{columns.section}.label_column: column '{label}' holds {whole[0]}, and labels below 0 are no class ids."
    if len(whole) > CLASSES_TO_LIST:
        raise UserError(
            f"{below} It has {len(whole):,} different numbers: if they measure something, set model.problem_type: "
            f"regression; if they are classes, list all of them in {columns.section}.labels."
        )
    names = json.dumps(list(dict.fromkeys(map(written, sorted(numbers)))))
    raise UserError(
        f"{below} If each number is the name of a class, list them: {columns.section}.labels: {names}; if they measure "
        "something, set model.problem_type: regression; if one of them means 'no label', remove those rows."
    )


def is_missing(value: Any) -> bool:
    blank = isinstance(value, str) and not value.strip()
    return value is None or blank or (isinstance(value, float) and math.isnan(value))


def written(value: Any) -> str:
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def listed_name(value: Any, names: Sequence[str]) -> str | None:
    """The name that a value is written as, or None. Booleans are found in any case: true, True."""
    name = written(value)
    if name in names:
        return name
    return next((known for known in names if known.lower() == name.lower()), None) if isinstance(value, bool) else None


def number_in_text(text: str, classes: int) -> Any:
    """The class id that a text writes and nothing else (0, 1, …; true and false of two classes), or the text. For
    classes without names: files of one dataset differ in whether their numbers are quoted."""
    if text.isdecimal() and str(int(text)) == text:
        return int(text)
    return {"true": 1, "false": 0}.get(text.lower(), text) if classes == 2 else text


def all_listed(values: Iterable[Any], names: Sequence[str]) -> bool:
    """Whether the data's values are all among `names` as they are written, and so are names and no ids."""
    given = [v for v in values if not is_missing(v)]
    return bool(given) and all(listed_name(value, names) is not None for value in given)


def check_listed_once(names: Sequence[str], key: str) -> None:
    """Raises `UserError` for a list of classes that has one of them twice: one of the two could never be meant."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        listed = ", ".join(f"'{name}'" for name in twice)
        raise UserError(f"{key} names {listed} more than once. Every class has one number: name each once.")


def all_whole(values: Sequence[Any]) -> bool:
    return all(float(v).is_integer() for v in values if v is not None and not math.isnan(v))


def unique_values(rows: Any, column: str) -> list[Any]:
    """Distinct values of a column, without turning all of it into Python objects."""
    return rows.unique(column)


def is_whole_number(name: str) -> bool:
    return name.removeprefix("-").isdecimal()
