"""One file from an address, into the cache.

It is fetched anew by every command, since many servers cannot say whether a file has changed; the ranks of a run and
the parts of a command read what the first of them has fetched. From then on it is a file like any other.
"""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

from automodel.config.errors import UserError
from automodel.data.fingerprint import digest
from automodel.data.permitted import shown
from automodel.data.store import unwritable

SILENT_S = 60.0  # without a byte
BY_PYTHON = ("http", "https", "ftp")


def fetch(address: str, folder: Path, section: str) -> Path:
    """The path below `folder` under which the file at an address lies now."""
    name = unquote(Path(urlsplit(address).path).name) or "data"
    path = folder / digest(address) / name.replace("/", "_")
    if _fetched_by_this_command(path):
        return path
    half = path.with_name(f".{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error.strerror or str(error)) from error
    try:
        with _opened(address) as remote, open(half, "wb") as file:
            shutil.copyfileobj(remote, file, 2**20)
        os.replace(half, path)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].replace(address, shown(address))
        raise UserError(
            f"{section}.data_files: '{shown(address)}' cannot be fetched: {reason}. Check the address and the "
            "connection, or download it and give the path of the file."
        ) from error
    finally:
        with suppress(OSError):
            half.unlink()
    return path


def _fetched_by_this_command(path: Path) -> bool:
    """Ranks are started together, and the first of them reads ahead of the others."""
    import psutil

    return path.is_file() and path.stat().st_mtime >= psutil.Process().create_time()


def _opened(address: str) -> Any:
    """What is at an address, as an open file. Buckets and the hub take packages of their own, which fsspec knows."""
    if address.split(":")[0].lower() in BY_PYTHON:
        return urlopen(address, timeout=SILENT_S)
    import fsspec

    return fsspec.open(address, "rb")
