"""Numbers for classes that have names elsewhere: in the training data, or in a model that was trained.

A dataset may count the same classes in another order. Its own names tell, those of a `ClassLabel` column or those that
`labels` lists; without any, numbers are taken in the order of the others, which only a person can confirm.
"""

from __future__ import annotations

from typing import Any

from automodel.config.errors import UserError
from automodel.data.columns import Columns, is_list, item_of, kind_of
from automodel.data.config import DatasetConfig
from automodel.data.label_kinds import is_whole_number
from automodel.data.labels import LabelMap

MANY = 6  # classes that are named in a note


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


def numbered(
    columns: Columns, label: str | tuple[str, ...], known: LabelMap | None, cfg: DatasetConfig
) -> tuple[str, ...]:
    """A note where numbers without names are taken for classes that are known by name."""
    if known is None or not known.names or known.vectors or not known.ids_allowed or cfg.labels:
        return ()
    if not isinstance(label, str) or kind_of(_item(columns.features[label])) != "integers":
        return ()
    if all(is_whole_number(name) for name in known.names):
        return ()
    shown = ", ".join(f"{i} = {name}" for i, name in enumerate(known.names[:MANY]))
    more = ", …" if len(known.names) > MANY else ""
    return (f"{columns.section}: its labels are numbers, read as classes by their place: {shown}{more}",)


def _item(feature: Any) -> Any:
    return item_of(feature) if is_list(feature) else feature
