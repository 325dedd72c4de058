"""Bytes on the disk: flushed, hashed, and replaced so that a reader never sees half a file. No torch here: whoever only
lists or checks checkpoints need not wait for it.

Large files that are waited for go straight from memory to the disk where the file system can (`O_DIRECT`). By way of
the page cache every byte is copied once more by a processor, and what is written pushes out what training reads.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from automodel.config.own_files import for_the_owner

PAGE = 4096  # places, sizes and addresses that go straight to a disk are multiples of it
NO_STRAIGHT_WAY = (errno.EINVAL, errno.EFAULT, errno.ENOTSUP)  # how file systems say that they have none
AHEAD = 1 << 27  # bytes in the page cache after which the disk is told to begin


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


def replace_text(path: Path, text: str, private: bool = False) -> None:
    """Writes a small file so that readers see either the old or the new text. A kill may leave what `left_over_of`
    finds. `private`: only its owner may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", opener=for_the_owner if private else None) as file:
        file.write(text)
    flush_to_disk(temporary)
    os.replace(temporary, path)


def left_over_of(path: Path) -> list[Path]:
    """What `replace_text` has left where it was killed while it wrote this file."""
    own = re.compile(rf"\.{re.escape(path.name)}\.\d+")
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    return [p for p in beside if own.fullmatch(p.name) and p.is_file() and not p.is_symlink()]


def write_text(path: Path, text: str) -> Written:
    """Writes a new file that only its owner may read, and returns once it is on the disk."""
    data = text.encode()
    with open(path, "wb", opener=for_the_owner) as file:
        file.write(data)
    flush_to_disk(path)
    return Written(len(data), hashlib.sha256(data).hexdigest())


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_whole(path: Path) -> bool:
    """Whether a `.safetensors` file is as long as its header says. Other damage only hashes see."""
    from safetensors import SafetensorError, safe_open

    if path.stat().st_size == 0:
        return False
    try:
        with safe_open(path, framework="numpy"):
            return True
    except SafetensorError:
        return False


def in_words(error: BaseException) -> str:
    """A refusal, mostly of a disk's, for people."""
    if isinstance(error, OSError):
        return (error.strerror or str(error)) + (f" ({error.filename})" if error.filename else "")
    return f"{type(error).__name__}: {error}"


class NewFile:
    """A file that is written once, from its beginning to its end. Pieces that are whole pages, in memory too, take the
    straight way; from the first that is not, or that the file system refuses, all go through the page cache.
    `at_once`: false where the system may bring it to the disk in its own time, and all goes through the page cache."""

    def __init__(self, path: Path, at_once: bool = True):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        self.size, self.at_once = 0, at_once
        self.straight = getattr(os, "O_DIRECT", 0) if at_once else 0
        try:
            self._descriptor = os.open(path, flags | self.straight, 0o666)
        except OSError as error:
            if not self.straight or error.errno not in NO_STRAIGHT_WAY:
                raise
            self.straight = 0
            self._descriptor = os.open(path, flags, 0o666)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)

    def write(self, piece: memoryview) -> None:
        while len(piece):
            if self.straight and len(piece) % PAGE:
                self._through_the_cache()
            try:
                written = os.write(self._descriptor, piece)
            except OSError as error:
                if not self.straight or error.errno not in NO_STRAIGHT_WAY:
                    raise
                self._through_the_cache()
                continue
            piece = piece[written:]
            self.size += written
            if self.at_once and not self.straight:
                self._begin_early(written)

    def flush(self) -> None:
        """Returns once everything is on the disk."""
        os.fsync(self._descriptor)

    def _through_the_cache(self) -> None:
        import fcntl  # there is one wherever there is a straight way

        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~self.straight)
        self.straight = 0

    def _begin_early(self, written: int) -> None:
        """Lets the disk begin with every `AHEAD` bytes: Linux does, and returns, when it is told that pages are not
        needed any more. It keeps those that are not on the disk yet."""
        before = self.size - written
        if before // AHEAD != self.size // AHEAD and hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # a hint, which some file systems do not take
                start = max(0, before - AHEAD)
                os.posix_fadvise(self._descriptor, start, self.size - start, os.POSIX_FADV_DONTNEED)
