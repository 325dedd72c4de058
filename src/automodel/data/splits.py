"""`split:` in the words of `datasets`: `train`, `train[:1000]`, `test[10%:20%]`, `train+validation`.

`datasets` does the arithmetic (its `ReadInstruction`), so a slice means the same rows whether the data comes from the
hub, from a file or from a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from automodel.config.errors import UserError
from automodel.data.columns import did_you_mean

PREFERRED = {"train": ("train",), "validation": ("validation", "valid", "val", "dev", "test")}


class SplitChoice(NamedTuple):
    """Of data that has several splits: the one that rows are taken from, and the others."""

    taken: str
    others: tuple[str, ...]


def choice_among(spec: str, available: Sequence[str]) -> SplitChoice | None:
    """None where there is nothing to choose."""
    if len(available) < 2:
        return None
    return SplitChoice(spec, tuple(name for name in available if name not in split_names(spec)))


def split_names(spec: str) -> list[str]:
    """The splits a specification takes rows from, each once."""
    return list(dict.fromkeys(part.split("[")[0].strip() for part in spec.split("+")))


def chosen_split(spec: str | None, available: Sequence[str], role: str, section: str) -> str:
    """The specification itself, or the split that the role usually has."""
    if spec is not None:
        for name in split_names(spec):
            if name not in available:
                raise unknown_split(name, available, section)
        return spec
    for name in PREFERRED[role]:
        if name in available:
            return name
    if len(available) == 1 and role == "train":
        return available[0]
    raise UserError(
        f"{section}.split: the data has no {' or '.join(PREFERRED[role][:1])} split. It has: {', '.join(available)}. "
        f"Say which one to use, e.g. {section}.split: {available[0]}{'[:10%]' if role == 'validation' else ''}."
    )


def unknown_split(name: str, available: Sequence[str], section: str) -> UserError:
    return UserError(
        f"{section}.split: the data has no split '{name}'. It has: {', '.join(available)}."
        + did_you_mean(name, available)
    )


def take(spec: str, load: Callable[[str], Any], section: str) -> Any:
    """The rows a specification means; `load` gives a whole split."""
    import datasets

    tables = {name: load(name) for name in split_names(spec)}
    if spec in tables:
        return tables[spec]
    try:
        parts = datasets.ReadInstruction.from_spec(spec).to_absolute({name: len(t) for name, t in tables.items()})
    except (ValueError, AssertionError) as error:
        raise bad_slice(spec, section) from error
    # An empty slice at the very end must not be asked for as a range: `select` checks where a range begins.
    slices = [(part.splitname, range(part.from_, part.to) if part.from_ < part.to else []) for part in parts]
    rows = [tables[name].select(chosen) for name, chosen in slices]
    return rows[0] if len(rows) == 1 else datasets.concatenate_datasets(rows)


def bad_slice(spec: str, section: str) -> UserError:
    return UserError(
        f"{section}.split: '{spec}' is not understood. Write train, train[:1000], train[10%:20%] or train+validation."
    )
