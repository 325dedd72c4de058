"""Files of our own: what they name, and who may read them.

A run folder, a checkpoint, a cache or a saved dataset may come from elsewhere, and its JSON may say anything. What is
opened, moved or removed because such a file names it goes through `file_inside`: it leads into the folder of that file,
and nowhere else. Files of a run are opened with `for_the_owner`.
"""

from __future__ import annotations

import os
from pathlib import Path

from automodel.config.errors import UserError
from automodel.config.values import short


class OutsideError(UserError):
    """A file names something that does not lie in its own folder."""


def file_inside(folder: Path, name: object, source: str | Path, *, replaced: bool = False) -> Path:
    """The path of `name` in `folder`; raises `OutsideError` for everything else: absolute paths, `..`, links that lead
    out of the folder, and what is no text. `source`: the file that says the name, for the message. `replaced`: the name
    itself will be removed or replaced, so that a link of that name is not followed; folders on the way to it are."""
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise OutsideError(
            f"{source} should name a file of its own folder, and says {short(repr(name), 120)}. {_ADVICE}"
        )
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts or "\\" in name or not parts:
        raise _outside(folder, name, source)
    path = folder / name
    try:
        place = (path.parent if replaced else path).resolve()
        root = folder.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise _outside(folder, name, source) from error
    if place != root and root not in place.parents:
        raise _outside(folder, name, source)
    return path


def for_the_owner(path: str, flags: int) -> int:
    """An opener for `open`: the file that it makes can be read by its owner alone."""
    return os.open(path, flags, 0o600)


_ADVICE = "Nothing was touched. Put back a copy of the file, or remove it if you do not know where it comes from."


def _outside(folder: Path, name: str, source: str | Path) -> OutsideError:
    return OutsideError(f"{source} names {short(repr(name), 120)}, which does not lie in {folder}. {_ADVICE}")
