"""What a part of the data has from the section it belongs to: validation data from `dataset`, an entry of a mixture
from the section around it. Whatever a part says itself comes first, by whichever key it says it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from automodel.data.config import DatasetConfig
from automodel.data.keys import KEYS_OF_ROLES
from automodel.data.language import ANSWER_ROLES

# Where the data lies and how it is processed; everything else in a section says what the columns are.
NOT_INHERITED = {
    "path", "mixture", "target", "name", "split", "data_files", "revision", "num_samples_limit", "on_bad_row", "extra",
    "column_names",
}  # fmt: skip
KINDS_OF_ROWS = (("column_mapping", "prompt_template"), ("messages_column",), ("text_column",))


def inherit(train: DatasetConfig, validation: DatasetConfig) -> DatasetConfig:
    """The validation section with everything it leaves open about columns and lengths taken from the training one."""
    around = _for_part(train, validation)
    changes = {
        f.name: getattr(around, f.name)
        for f in fields(DatasetConfig)
        if f.name not in NOT_INHERITED and getattr(validation, f.name) == f.default
    }
    if validation.path is None and validation.target is None and validation.mixture is None:
        places = ("path", "target", "name", "data_files", "revision", "extra", "column_names")
        changes.update({name: getattr(train, name) for name in places if not getattr(validation, name)})
    return replace(validation, **changes)


def members_of(cfg: DatasetConfig, section: str = "dataset") -> list[tuple[str, DatasetConfig]]:
    """The datasets a section consists of, each with its place in the config: itself, or those of its mixture."""
    if cfg.mixture is None:
        return [(section, cfg)]
    members = []
    for number, entry in enumerate(cfg.mixture):
        own = {f.name: getattr(entry, f.name) for f in fields(entry) if f.name != "weight"}
        given = {name: value for name, value in own.items() if value is not None}
        members.append((f"{section}.mixture.{number}", replace(_for_part(cfg, entry), mixture=None, **given)))
    return members


def _for_part(section: DatasetConfig, own: Any) -> DatasetConfig:
    """A section without what a part of it says otherwise: which kind its rows are, or which column has a role."""
    otherwise: dict[str, Any] = dict.fromkeys(_read_otherwise(section, own))
    for role in own.column_mapping or ():
        if role in KEYS_OF_ROLES:
            otherwise[KEYS_OF_ROLES[role]] = None
    if own.label_column or "label_column" in otherwise:
        otherwise["label_columns"] = None
    elif getattr(own, "label_columns", None):  # an entry of a mixture has no such key
        otherwise["label_column"] = None
    mapping = section.column_mapping
    if mapping and "column_mapping" not in otherwise:
        left = {role: column for role, column in mapping.items() if not _names(own, KEYS_OF_ROLES.get(role))}
        otherwise["column_mapping"] = left or None
    return replace(section, **otherwise)


def _names(own: Any, key: str | None) -> bool:
    given = (key, "label_columns") if key == "label_column" else (key or "",)
    return any(getattr(own, name, None) for name in given)


def _read_otherwise(section: DatasetConfig, own: Any) -> set[str]:
    """Keys of a section that do not hold for a part of it, because the part says itself whether its rows are
    instructions, chats or plain text."""
    if not any(role in ANSWER_ROLES for role in section.column_mapping or ANSWER_ROLES):
        return set()  # names of a classifier's columns
    said = [kind for kind in KINDS_OF_ROWS if any(getattr(own, key) is not None for key in kind)]
    return {key for kind in KINDS_OF_ROWS if said and kind not in said for key in kind}
