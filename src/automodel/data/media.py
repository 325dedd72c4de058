"""Columns of images, sounds and the like stay as they are stored.

`datasets` decodes such a cell whenever its row is read, and what it decodes may be an address that the cell names. What
is learned here is text; a column beside it is never opened.
"""

from __future__ import annotations

import copy
from typing import Any

from automodel.data.files import quiet


def undecoded(rows: Any) -> Any:
    """The rows, with no column that is decoded when it is read."""
    import datasets

    with quiet(datasets):
        for name, feature in rows.features.items():
            if _decodes(feature):
                rows = rows.cast_column(name, _stored(feature))
    return rows


def _parts(feature: Any) -> list[Any]:
    """The features that a nested one is made of."""
    if isinstance(feature, dict):
        return list(feature.values())
    if isinstance(feature, list | tuple):
        return list(feature)
    return [feature.feature] if hasattr(feature, "feature") else []


def _decodes(feature: Any) -> bool:
    return _opens_paths(feature) or any(map(_decodes, _parts(feature)))


def _opens_paths(feature: Any) -> bool:
    """Whether what it decodes is a file that the cell names; JSON is decoded, too, and is text."""
    import pyarrow

    stored = getattr(feature, "pa_type", None)
    named = stored is not None and pyarrow.types.is_struct(stored) and stored.get_field_index("path") >= 0
    return named and bool(getattr(feature, "decode", False))


def _stored(feature: Any) -> Any:
    if isinstance(feature, dict):
        return {name: _stored(part) for name, part in feature.items()}
    if isinstance(feature, list | tuple):
        return [_stored(part) for part in feature]
    feature = copy.copy(feature)
    if _opens_paths(feature):
        feature.decode = False
    if hasattr(feature, "feature"):
        feature.feature = _stored(feature.feature)
    return feature
