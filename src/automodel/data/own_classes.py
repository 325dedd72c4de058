"""Numbers for classes that have names elsewhere: in the training data, or in a model that was trained.

A dataset may count the same classes in another order. Its own names tell, those of a `ClassLabel` column or those that
`labels` lists; without any, numbers are taken in the order of the others, which only a person can confirm. It may also
write several classes of a row in another way: names in one file, a 0 or 1 for each class in another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.data.columns import Columns, is_list, is_mixed, is_string, item_of, kind_of
from automodel.data.config import DatasetConfig
from automodel.data.label_kinds import (
    MULTI,
    REGRESSION,
    is_list_text,
    is_missing,
    is_whole_number,
    list_in_text,
    written,
)
from automodel.data.labels import LabelMap

MANY = 6  # classes that are named in a note
FEWEST = 3  # classes of which one is -1, before that is taken for a class and not for 'no label'


def own_names(
    columns: Columns, label: str | tuple[str, ...], labels: LabelMap, cfg: DatasetConfig
) -> tuple[str, ...] | None:
    """Names behind this dataset's class ids, where ids alone would mean another class than those of `labels`."""
    if not labels.names or not isinstance(label, str):
        return None
    item = _item(columns.features[label])
    names = getattr(item, "names", None) or (cfg.labels if kind_of(item) == "integers" else None)
    if not names or tuple(names) == labels.names:
        return None
    if labels.vectors:
        raise UserError(
            f"{columns.section}.labels: the values of '{label}' are 0 or 1 for each class, in the order of "
            f"{labels.origin} ({', '.join(labels.names[:MANY])}). Write them in that order, and remove labels."
        )
    return tuple(names)


def as_written_here(rows: Any, columns: Columns, label: str | tuple[str, ...], known: LabelMap) -> LabelMap:
    """The known classes as this dataset writes them: by number where they have names elsewhere, and several classes of
    a row as a list or as a vector."""
    if known.names and _are_integers(columns, label) and not any(map(is_whole_number, known.names)):
        known = replace(known, ids_allowed=True)
    if known.problem_type != MULTI:
        return known
    vectors = not isinstance(label, str) or _holds_vectors(rows, label, columns.features[label], known)
    return replace(known, vectors=vectors)


def check_not_shifted(
    rows: Any, columns: Columns, label: str | tuple[str, ...], known: LabelMap, cfg: DatasetConfig
) -> None:
    """Raises `UserError` where this dataset counts its classes from another number than the known ones, 0 to 4 instead
    of 1 to 5. Only rows of the class at one end could not be used; leaving them out would keep all the others under
    the wrong class. `known`: as `as_written_here` gives it."""
    if not isinstance(label, str) or own_names(columns, label, known, cfg) is not None:
        return
    classes = _numbers_of(known)
    here = _whole_numbers(rows[label] if is_list(columns.features[label]) else rows.unique(label))
    if not classes or here is None or here <= classes:
        return
    by = next((by for by in (1, -1) if {number + by for number in here} <= classes), None)
    if by is None or len(here) < max(2, len(classes) / 2):
        return
    if -1 in here and len(here) < max(FEWEST, len(classes)):
        return
    raise UserError(
        f"{columns.section}.label_column: column '{label}' counts its classes from {min(here)} ({_range(here)}), and "
        f"{known.origin} from {min(classes)} ({_range(classes)}), so each number here would mean another class. Count "
        f"from the same number in both, e.g. {'add 1 to' if by == 1 else 'take 1 from'} every label here."
    )


def _numbers_of(known: LabelMap) -> set[int]:
    """The numbers by which the known classes are called, where they are called by numbers."""
    if known.vectors or known.problem_type == REGRESSION:
        return set()
    if known.ids_allowed or not known.names:
        return set(range(known.num_labels))
    return {int(name) for name in known.names} if all(map(is_whole_number, known.names)) else set()


def _whole_numbers(values: Any) -> set[int] | None:
    """The different numbers among labels, or lists of them; None where there is anything else."""
    found: set[int] = set()
    for value in values:
        items = _read(value) if is_list_text(value) else value if isinstance(value, list) else [value]
        for item in items:
            if is_missing(item) or item == IGNORE:
                continue
            text = written(item)
            if isinstance(item, bool) or not is_whole_number(text):
                return None
            found.add(int(text))
    return found


def _range(numbers: set[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}"


def _holds_vectors(rows: Any, label: str, feature: Any, known: LabelMap) -> bool:
    """Lists of ids never repeat one, while vectors of more than two classes do. One row that is wrong must not make
    ids of all the others."""
    if is_string(feature):
        lists = [found for text in rows[label] if (found := _read(text))]
    elif is_list(feature):
        lists = [value for value in rows[label] if value]
    else:
        return known.vectors and is_mixed(feature)  # rows that cannot be read are named as such
    kinds = {type(item) for value in lists for item in value if item is not None}
    if str in kinds or not kinds:
        return known.vectors and not (known.names and kinds)
    if kinds & {float, bool}:
        return True
    whole = [value for value in lists if len(value) == known.num_labels]
    all_whole = len(whole) == len(lists)
    two = known.num_labels == 2 and {item for value in whole for item in value} <= {0, 1, None}
    return any(len(set(value)) < len(value) for value in whole) or (all_whole and (known.vectors or two))


def _read(text: Any) -> list[Any]:
    """What cannot be read is a bad row later on."""
    try:
        return list_in_text(text) if is_list_text(text) else []
    except ValueError:
        return []


def numbered(
    columns: Columns, label: str | tuple[str, ...], known: LabelMap | None, labels: LabelMap | None, cfg: DatasetConfig
) -> tuple[str, ...]:
    """A note where numbers without names are taken for classes that are known by name. `labels`: the known ones, as
    they are written here."""
    if known is None or labels is None or not known.names:
        return ()
    what = _without_names(columns, label, labels, cfg)
    if what is None:
        return ()
    places = range(len(known.names)) if isinstance(label, str) else label
    shown = ", ".join(f"{place} = {name}" for place, name in list(zip(places, known.names))[:MANY])
    return (f"{columns.section}: its {what} by their place: {shown}{', …' if len(known.names) > MANY else ''}",)


def _without_names(columns: Columns, label: str | tuple[str, ...], labels: LabelMap, cfg: DatasetConfig) -> str | None:
    names, targets = labels.names or (), labels.problem_type == REGRESSION
    if not isinstance(label, str):
        what = f"label columns are read as {'targets' if targets else 'classes'}"
        return None if label == names else what
    item = _item(columns.features[label])
    if cfg.labels or getattr(item, "names", None):
        return None
    if targets:
        return "targets are read" if labels.num_labels > 1 else None
    if labels.vectors:
        return "labels are a 0 or 1 for each class, read"
    if not labels.ids_allowed or kind_of(item) != "integers" or all(map(is_whole_number, names)):
        return None
    return "labels are numbers, read as classes"


def _are_integers(columns: Columns, label: str | tuple[str, ...]) -> bool:
    return isinstance(label, str) and kind_of(_item(columns.features[label])) == "integers"


def _item(feature: Any) -> Any:
    return item_of(feature) if is_list(feature) else feature
