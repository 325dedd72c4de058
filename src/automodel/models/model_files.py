"""What each file of transformers exports, without reading 3,000 files.

To know which class lies in which file, transformers opens every file below `transformers/models`, once for
`transformers` and once more for `transformers.models`: 35 MB each time, a quarter of a lean start. The answer depends
on the files alone, so it is kept: for the second question in memory, and for the next process in the cache folder,
under a name made of the version and of when the model folders were last changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from automodel.config.cache import cache_folder
from automodel.config.json_text import parse_json


class ModelFiles:
    """Stands in for transformers' scan while it is being imported."""

    SCAN = "create_import_structure_from_path"
    """The function of `transformers.utils.import_utils`."""

    def __init__(self) -> None:
        self._module: Any = None
        self._scan: Callable[[Any], Any] | None = None
        self._known: dict[str, Any] = {}

    @contextmanager
    def remembered(self) -> Generator[None]:
        """The block in which transformers is imported."""
        try:
            yield
        finally:
            if self._module is not None:
                setattr(self._module, self.SCAN, self._scan)
                self._known = {}

    def watch(self, importer: str, imported: Any) -> None:
        """Steps in between the moment the scan is imported and the moment `transformers` calls it."""
        if self._module is None and importer == "transformers" and hasattr(imported, self.SCAN):
            self._module, self._scan = imported, getattr(imported, self.SCAN)
            setattr(imported, self.SCAN, self._structure)

    def _structure(self, path: Any) -> Any:
        assert self._scan is not None
        folder = os.path.dirname(path) if os.path.isfile(path) else os.fspath(path)
        if os.path.basename(folder) != "models":
            return self._scan(path)
        if folder not in self._known:
            self._known[folder] = _kept_or(lambda: self._scan(path), Path(folder))  # ty: ignore[call-non-callable]
        return copied(self._known[folder])


def copied(structure: Any) -> Any:
    """Nested dictionaries of sets, as their reader would get them fresh."""
    if isinstance(structure, dict):
        return {key: copied(value) for key, value in structure.items()}
    return set(structure)


def _kept_or(scan: Callable[[], Any], folder: Path) -> Any:
    """What an earlier process found out, or what the scan finds."""
    root = cache_folder()
    kept = root / f"transformers-{_stamp(folder)}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):  # not there, or not as we write it
        return from_json(parse_json(kept.read_text(encoding="utf-8")))
    structure = scan()
    with suppress(OSError):  # nowhere to keep it: the next process scans again
        root.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_name(f".{kept.name}.{os.getpid()}")
        temporary.write_text(json.dumps(to_json(structure)), encoding="utf-8")
        os.replace(temporary, kept)
    return structure


def _stamp(folder: Path) -> str:
    """Changes with the version, and whenever a file is added, removed or replaced in one of the model folders."""
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    changed = sorted((entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(folder))
    return hashlib.blake2b(repr((version, str(folder), changed)).encode(), digest_size=8).hexdigest()


def to_json(structure: Any) -> Any:
    """Dictionaries, whose keys are names or sets of names, as lists of pairs; sets as sorted lists."""
    if isinstance(structure, dict):
        pairs = structure.items()
        return {"of": [[sorted(k) if isinstance(k, frozenset) else k, to_json(value)] for k, value in pairs]}
    return sorted(structure)


def from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {frozenset(k) if isinstance(k, list) else k: from_json(v) for k, v in value["of"]}
    return set(value)
