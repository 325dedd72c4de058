"""Bytes on the disk: flushed, hashed, and replaced so that a reader never sees half a file. No torch here: whoever only
lists or checks checkpoints need not wait for it."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Written:
    """A file as its manifest describes it."""

    size: int
    sha256: str


def flush_to_disk(path: Path) -> None:
    """So that a rename never outlives the bytes it names. Folders too, where the file system can: some that lie behind
    a network (SMB, object stores) know no such thing, and refuse it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Writes a small file so that readers see either the old or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    flush_to_disk(temporary)
    os.replace(temporary, path)


def write_text(path: Path, text: str) -> Written:
    """Writes a new file and returns once it is on the disk."""
    data = text.encode()
    path.write_bytes(data)
    flush_to_disk(path)
    return Written(len(data), hashlib.sha256(data).hexdigest())


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
