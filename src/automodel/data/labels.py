"""From whatever a dataset calls its labels to what a loss wants.

`LabelMap` is inferred once, from the training data, and then used for every row and for the validation data too, so
both agree on which class is number 3. What the labels look like decides the problem, under Hugging Face's names:

- class ids, class names (sorted, or in the order of `dataset.labels`), booleans: `single_label_classification`;
- lists of ids or names (also as text, see `label_kinds`), 0/1 vectors, several 0/1 columns:
  `multi_label_classification`;
- real numbers, lists of them, several columns of them: `regression`.

`model.problem_type` decides where it is given; labels that cannot be read so are an error.

Integers that are not 0, 1, 2, … (1 to 5 stars; 0 and 4) are names of classes like any other, and so are those that
`dataset.labels` lists. A checkpoint whose head already tells the data's classes apart gives their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from automodel.config.errors import UserError
from automodel.data.columns import Columns, is_list, is_mixed, is_string, item_of, kind_of
from automodel.data.config import DatasetConfig
from automodel.data.label_kinds import (
    MULTI,
    REGRESSION,
    SINGLE,
    all_listed,
    all_whole,
    are_lists_as_text,
    check_class_ids,
    check_label_feature,
    check_tags,
    different_kinds,
    is_list_text,
    is_missing,
    list_in_text,
    listed_name,
    lists_in_text,
    number_in_text,
    unique_values,
    written,
)

NUMBERS = ("int", "uint", "float", "double", "decimal", "bool")  # how their dtypes begin


class BadLabel(Exception):
    """A row's label cannot be used; the message says why."""


@dataclass(frozen=True)
class LabelMap:
    """How a row's label becomes a number (single label) or a vector of numbers."""

    problem_type: str
    num_labels: int
    names: tuple[str, ...] | None = None
    """Class names in the order of their ids."""
    ids_allowed: bool = True
    """Integers in the data are class ids; otherwise they are names."""
    vectors: bool = False
    """Multi-label rows are 0/1 vectors and not lists of classes."""
    origin: str = "the training data"
    """Where the classes are known from, for error messages."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LabelMap:
        names: Any = None if data["names"] is None else tuple(data["names"])
        return cls(**(data | {"names": names}))

    def __call__(self, value: Any) -> int | list[float]:
        if value is None:
            raise BadLabel("the label is missing")
        if self.problem_type == REGRESSION:
            return self._numbers(self._list(value))
        if self.problem_type == MULTI:
            return self._classes(self._list(value))
        return self.class_id(value)

    def _list(self, value: Any) -> Any:
        """A list written as text, as a list; anything else, and a class of that very name, as it is."""
        if not is_list_text(value) or value in (self.names or ()):
            return value
        try:
            return list_in_text(value)
        except ValueError:
            raise BadLabel(f'the label {value} cannot be read as a list; write it as JSON, e.g. ["a", "b"]') from None

    def class_id(self, value: Any) -> int:
        if isinstance(value, float):
            if math.isnan(value):
                raise BadLabel("the label is missing")
            value = int(value) if value.is_integer() else value
        if isinstance(value, str) and not value.strip():
            raise BadLabel("the label is empty")
        if not self.names and isinstance(value, str):
            value = number_in_text(value, self.num_labels)
        if isinstance(value, bool) and (name := listed_name(value, self.names or ())) and self.names:
            return self.names.index(name)  # a name comes before a number: classes may be true, false in this order
        if isinstance(value, int) and (self.ids_allowed or not self.names):
            if 0 <= int(value) < self.num_labels:
                return int(value)
            if value == -1:
                raise BadLabel(
                    "the label is -1, which public datasets use for 'no label' (if it is a class, list it and all "
                    "others in dataset.labels)"
                )
            hint = " (labels below 0 are no class ids; if it is a class, list it and all others in dataset.labels)"
            raise BadLabel(f"label {value} is outside 0..{self.num_labels - 1}{hint if value < 0 else ''}")
        name = listed_name(value, self.names or ())
        if self.names and name is not None:
            return self.names.index(name)
        raise BadLabel(f"label '{value}' does not occur in {self.origin}")

    def _numbers(self, value: Any) -> list[float]:
        values = value if isinstance(value, (list, tuple)) else [value]
        try:
            numbers = [float(v) for v in values]
        except (TypeError, ValueError):
            raise BadLabel(f"the target {value!r} is not a number") from None
        if not all(math.isfinite(number) for number in numbers):
            raise BadLabel("the target is not a finite number")
        if len(numbers) != self.num_labels:
            raise BadLabel(f"the row has {len(numbers)} targets, not {self.num_labels}")
        return numbers

    def _classes(self, value: Any) -> list[float]:
        values = value if isinstance(value, (list, tuple)) else [value]
        if not self.vectors:
            vector = [0.0] * self.num_labels
            for item in values:
                vector[self.class_id(item)] = 1.0
            return vector
        if len(values) != self.num_labels:
            raise BadLabel(f"the row has {len(values)} label values, not {self.num_labels}")
        try:
            numbers = [float(v) for v in values]
        except (TypeError, ValueError):  # missing, or names where training had numbers
            numbers = [math.nan]
        if not all(0 <= number <= 1 for number in numbers):
            raise BadLabel(f"multi-label values must be 0 or 1; got {list(values)}")
        return numbers


def in_known_order(found: LabelMap, known: Sequence[str] | None) -> LabelMap:
    """Names in the order of `known`, a model's classes, where they are the same but for upper and lower case: a head
    that has learned them would otherwise begin with other classes' answers. The data's own ids are then out of order,
    so plain integers beside names are no longer taken as ids."""
    if not known or not found.names or found.vectors:
        return found
    own = {name.lower(): name for name in found.names}
    order = tuple(own.get(name.lower(), "") for name in known)
    if sorted(order) != sorted(found.names) or order == found.names:
        return found
    return replace(found, names=order, ids_allowed=False)


def columns_in_order(
    label: str | tuple[str, ...], labels: LabelMap | None, known: Sequence[str] | None
) -> str | tuple[str, ...]:
    """Label columns in the order of what they are: that of the training data, or of a head that has learned them."""
    order = (labels.names if labels is not None else known) or ()
    if isinstance(label, str) or sorted(order) != sorted(label):
        return label
    return tuple(order)


def infer_labels(
    rows: Any,
    columns: Columns,
    label: str | Sequence[str],
    cfg: DatasetConfig,
    num_labels: int | None = None,
    problem_type: str | None = None,
) -> LabelMap:
    """The map of a training set: `label` is one column, or several with a class or a number each."""
    if not isinstance(label, str):
        return _checked(_of_columns(rows, label, cfg, columns, problem_type), num_labels, columns)
    feature = columns.features[label]
    if is_mixed(feature):
        raise UserError(different_kinds(rows, label, columns))
    check_label_feature(feature, label, columns)
    as_text = is_string(feature) and are_lists_as_text(rows, label, cfg, problem_type, columns)
    if is_list(feature) or as_text:
        lists, item = lists_in_text(rows[label], label, columns) if as_text else (rows[label], item_of(feature))
        found = _of_lists(lists, label, item, cfg, num_labels, problem_type, columns)
        return _checked(found, num_labels, columns)
    kind = _kind(rows, label, feature)
    if kind == "float" and (num_labels or 1) > 1 and problem_type in (None, REGRESSION):
        if problem_type == REGRESSION or not all_whole(unique_values(rows, label)):
            raise UserError(
                f"model.num_labels is {num_labels}, but column '{label}' of {columns.section} holds one number a row: "
                "for regression remove model.num_labels, for classes write whole numbers or names."
            )
        kind = "int"
    if problem_type == REGRESSION or (
        problem_type is None and (kind == "float" or (num_labels == 1 and kind == "int"))
    ):
        if kind == "string":
            raise _needs_numbers(label, feature, columns)
        return _of_numbers(num_labels or 1, cfg, columns)
    said = bool(cfg.label_column or num_labels or problem_type)
    found = _of_classes(rows, label, feature, kind, cfg, num_labels, said, columns)
    if problem_type == MULTI:
        found = LabelMap(MULTI, found.num_labels, found.names, found.ids_allowed, origin=found.origin)
    return _checked(found, num_labels, columns)


def _kind(rows: Any, label: str, feature: Any) -> str:
    """`string`, `int` or `float`. A CSV file turns integers into floats as soon as one of them is missing."""
    if is_string(feature):
        return "string"
    dtype = str(getattr(feature, "dtype", ""))
    if not dtype.startswith(("float", "double", "decimal")):
        return "int"
    values = unique_values(rows, label)
    has_gaps = any(v is None or (isinstance(v, float) and math.isnan(v)) for v in values)
    return "int" if has_gaps and all_whole(values) else "float"


def _of_classes(rows, label, feature, kind, cfg, num_labels, said: bool, columns: Columns) -> LabelMap:
    """`said`: somebody says that these are the classes, however many there are."""
    if cfg.labels:
        values = unique_values(rows, label)
        ids = not all_listed(values, cfg.labels)
        if ids:
            check_class_ids(values, label, cfg, columns)
        return LabelMap(SINGLE, len(cfg.labels), tuple(cfg.labels), ids_allowed=ids, origin="dataset.labels")
    names = getattr(feature, "names", None)
    if names:
        return LabelMap(SINGLE, len(names), tuple(names), origin="the dataset's class names")
    values = [v for v in unique_values(rows, label) if not is_missing(v)]
    if not values:
        raise UserError(f"{columns.section}.label_column: every label in column '{label}' is missing.")
    check_class_ids(values, label, cfg, columns)
    if not said and len(values) > 20 and len(values) > len(rows) / 2:
        raise UserError(
            f"{columns.section}.label_column: column '{label}' has {len(values):,} different values in {len(rows):,} "
            f"rows, so it looks like an identifier and not like a class. Name the column of the class; if it is this "
            f"one, {columns.section}.label_column: {label}. Columns: {columns.listed()}."
        )
    if kind == "string":
        return LabelMap(SINGLE, len(values), tuple(sorted(values)), ids_allowed=False)
    if not all_whole(values):
        return LabelMap(SINGLE, len(values), tuple(map(written, sorted(values))), ids_allowed=False)
    whole = sorted({int(v) for v in values})
    if num_labels is not None or whole == list(range(len(whole))) or whole[0] < 0:
        highest = max(whole[-1] + 1, 1)
        return LabelMap(SINGLE, num_labels or highest)
    return LabelMap(SINGLE, len(whole), tuple(str(v) for v in whole), ids_allowed=False)


def _of_numbers(count: int, cfg: DatasetConfig, columns: Columns) -> LabelMap:
    if cfg.labels:
        raise UserError(
            f"{columns.section}.labels names classes, but the labels are numbers to be met (regression). Remove it, or "
            f"set model.problem_type to {SINGLE}."
        )
    return LabelMap(REGRESSION, count)


def _of_columns(rows: Any, labels: Sequence[str], cfg, columns: Columns, problem_type: str | None) -> LabelMap:
    """A column for each class, or for each number."""
    if problem_type == SINGLE:
        raise _not_one_class(f"dataset.label_columns names {len(labels)} columns")
    if len(set(labels)) < len(labels):
        raise UserError(f"{columns.section}.label_columns names a column twice: {_listed(labels)}.")
    if cfg.labels:
        raise UserError(f"{columns.section}.labels: the classes of label_columns have the columns' names. Remove one.")
    as_written = [name for name in labels if is_string(columns.features[name])]
    for name in labels:
        as_text = name in as_written and {*unique_values(rows, name)} <= {"0", "1", None}
        if not as_text and not str(getattr(columns.features[name], "dtype", "")).startswith(NUMBERS):
            raise UserError(
                f"{columns.section}.label_columns: column '{name}' holds {kind_of(columns.features[name])}, but each "
                "of these columns has to hold numbers: 0 and 1 for a class, any others for regression."
            )
    numbers = [name for name in labels if name not in as_written]
    decimals = problem_type is None and not all(all_whole(unique_values(rows, name)) for name in numbers)
    kind = REGRESSION if decimals or problem_type == REGRESSION else MULTI
    return LabelMap(kind, len(labels), tuple(labels), vectors=True)


def _of_lists(rows: Iterable, label: str, item: Any, cfg, num_labels, problem_type, columns: Columns) -> LabelMap:
    if problem_type == SINGLE:
        raise _not_one_class(f"column '{label}' of {columns.section} holds a list in every row")
    dtype = str(getattr(item, "dtype", ""))
    names = tuple(cfg.labels) if cfg.labels else (tuple(getattr(item, "names", None) or ()) or None)
    lists = [v for v in rows if v is not None]
    sizes = {len(v) for v in lists}
    values = {x for v in lists for x in v if not is_missing(x)}
    if not any(lists):
        raise UserError(f"{columns.section}.label_column: no row has a label in column '{label}'.")
    decimals = dtype.startswith("float")
    if problem_type == REGRESSION or (problem_type is None and decimals and not values <= {0.0, 1.0}):
        if is_string(item):
            raise _needs_numbers(label, columns.features[label], columns)
        return _of_numbers(num_labels or max(sizes), cfg, columns)
    if decimals or (_are_vectors(lists, sizes, values) and (names is None or cfg.labels or len(names) in sizes)):
        if cfg.labels and len(cfg.labels) not in sizes:
            raise UserError(
                f"{columns.section}.labels names {len(cfg.labels)} classes, but column '{label}' holds vectors of "
                f"{max(sizes)} numbers, one for each class. Name as many."
            )
        return LabelMap(MULTI, (num_labels if decimals else None) or max(sizes), names, vectors=True)
    if names:
        ids = not (cfg.labels and all_listed(values, names))
        if ids and cfg.labels:
            check_class_ids(values, label, cfg, columns)
        origin = "dataset.labels" if cfg.labels else "the dataset's class names"
        return LabelMap(MULTI, len(names), names, ids_allowed=ids, origin=origin)
    if is_string(item):
        return LabelMap(MULTI, len(values), tuple(sorted(values)), ids_allowed=False)
    check_class_ids(values, label, cfg, columns)
    return LabelMap(MULTI, num_labels or max(values, default=0) + 1)


def _are_vectors(lists: list, sizes: set[int], values: set) -> bool:
    """0/1 vectors are all equally long and repeat a value somewhere; lists of class ids never repeat one. Vectors of
    two classes need not repeat any ([1, 0], [0, 1]); as ids they would all say the same."""
    return len(sizes) == 1 and values <= {0, 1} and (sizes == {2} or any(len(set(v)) < len(v) for v in lists))


def _needs_numbers(label: str, feature: Any, columns: Columns) -> UserError:
    return UserError(
        f"{columns.section}.label_column: regression needs numbers, but column '{label}' holds {kind_of(feature)}."
    )


def _not_one_class(what: str) -> UserError:
    return UserError(
        f"model.problem_type is {SINGLE}, one class a row, but {what}. Write the class itself, a name or a number, "
        f"or set model.problem_type to {MULTI} or {REGRESSION}."
    )


def infer_tags(rows: Any, columns: Columns, tags: str, cfg: DatasetConfig, num_labels: int | None = None) -> LabelMap:
    """The map of a training set whose column `tags` holds a list for each row, one tag a word."""
    return _checked(_of_tags(rows, columns, tags, cfg, num_labels), num_labels, columns)


def _of_tags(rows: Any, columns: Columns, tags: str, cfg: DatasetConfig, num_labels: int | None) -> LabelMap:
    item = item_of(columns.features[tags])
    names = tuple(getattr(item, "names", None) or ())
    if names and not cfg.labels:
        return LabelMap(SINGLE, len(names), names, origin="the dataset's tag names")
    check_tags(rows, tags, columns)
    values = {tag for row in rows[tags] if row is not None for tag in row if tag is not None and tag != -100}
    if cfg.labels:
        ids = not all_listed(values, cfg.labels)
        return LabelMap(SINGLE, len(cfg.labels), tuple(cfg.labels), ids, origin="dataset.labels")
    if not values:
        raise UserError(f"{columns.section}.label_column: no word in column '{tags}' has a tag.")
    if is_string(item):
        return LabelMap(SINGLE, len(values), tuple(sorted(values)), ids_allowed=False)
    if not all_whole(list(values)):
        raise UserError(f"{columns.section}.label_column: the tags in column '{tags}' are decimals, and no classes.")
    return LabelMap(SINGLE, num_labels or int(max(values)) + 1)


def _checked(found: LabelMap, num_labels: int | None, columns: Columns) -> LabelMap:
    """Agreement with the number of classes the model was asked to have."""
    if num_labels is not None and found.names is not None and len(found.names) != num_labels:
        if len(found.names) > num_labels:
            raise UserError(
                f"model.num_labels is {num_labels}, but the labels of {columns.section} have {len(found.names)} "
                f"classes: {_listed(found.names)}. Remove model.num_labels or set it to {len(found.names)}."
            )
        filled = found.names + tuple(f"LABEL_{i}" for i in range(len(found.names), num_labels))
        return LabelMap(found.problem_type, num_labels, filled, found.ids_allowed, found.vectors, found.origin)
    if found.problem_type == SINGLE and found.num_labels < 2:
        only = f"'{found.names[0]}'" if found.names else "0"
        raise UserError(
            f"{columns.section}.label_column: every row has the same label {only}, so there is nothing to tell apart. "
            "Data sorted by label and then cut (split: train[:1000], num_samples_limit) looks like this: take more "
            "rows, or shuffle the file."
        )
    return found


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return shown + (", …" if len(names) > 8 else "")
