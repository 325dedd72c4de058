"""Compressed data files (`reviews.csv.gz`, `reviews.zip`): what is inside, read as a stream.

A ZIP archive is read where it holds one data file. Nothing in it is ever unpacked under a name or a path that the
archive gives. A small file can hold nearly any amount of bytes; one that holds far more than data ever do is refused
while it is read.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import uuid
import zipfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

ENDINGS = (".gz", ".bz2", ".xz", ".zst", ".zip")
UNPACKED_BY = {".gz": "zcat", ".bz2": "bzcat", ".xz": "xzcat", ".zst": "zstdcat", ".zip": "unzip -p"}
MOST_TIMES = 250  # text compresses to a third or a tenth, very regular tables to a hundredth
ALWAYS_ALLOWED = 2**30  # bytes
BY_MACOS = "__macosx/"
NO_DATA = (".", "readme", "license", "licence")  # how names of files begin that lie beside the data


_SPOILT = (zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, NotImplementedError, RuntimeError)


class PackedError(Exception):
    """A compressed file that is not read. The message says why, and what to do."""


def _spoilt(error: Exception) -> PackedError:
    reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
    return PackedError(f"{reason}. Copy it again, or give it the name of what it is")


def is_packed(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS


def plain_name(path: Path) -> str:
    """The name of what is inside: of a ZIP archive its only member, of other files their own name without `.gz`."""
    if not is_packed(path):
        return path.name
    own = path.name.removesuffix(path.suffix)
    if path.suffix.lower() == ".zip" and not PurePosixPath(own).suffix and path.is_file():
        with suppress(OSError, PackedError, *_SPOILT), zipfile.ZipFile(path) as archive:
            return PurePosixPath(only_member(archive, path).filename).name
    return own


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked while they are read."""
    if not is_packed(path):
        return open(path, "rb")
    return io.BufferedReader(_Bounded(path, _READERS[path.suffix.lower()](path)), 1 << 20)


def unpacked(path: Path, folder: Path) -> Path:
    """The file itself, or a copy of what is inside it in a folder that is named by its content."""
    if not is_packed(path):
        return path
    copy = folder / f"rows{PurePosixPath(plain_name(path)).suffix.lower()}"
    if copy.exists():
        return copy
    half = copy.with_name(f".{uuid.uuid4().hex[:8]}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with opened(path) as packed, open(half, "wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        os.replace(half, copy)
    finally:
        half.unlink(missing_ok=True)
    return copy


def why_not_read(path: Path) -> str | None:
    """What is wrong with a ZIP archive as such: it is damaged, or holds several files."""
    if path.suffix.lower() == ".zip":
        try:
            opened(path).close()
        except PackedError as error:
            return str(error)
    return None


def only_member(archive: zipfile.ZipFile, path: Path) -> zipfile.ZipInfo:
    """The one data file of an archive, beside which a README or a licence may lie."""
    members = [member for member in archive.infolist() if not member.is_dir() and not _beside_data(member.filename)]
    if len(members) == 1:
        if members[0].flag_bits & 1:
            raise PackedError("it needs a password. Unpack it, and name the file")
        return members[0]
    if not members:
        raise PackedError("there is no data file in it. Name another file")
    names = ", ".join(f"'{member.filename}'" for member in members[:4]) + (", …" if len(members) > 4 else "")
    raise PackedError(
        f"it holds {len(members):,} files ({names}), and only an archive of one data file is read. Unpack it "
        f"(`unzip {path} -d {path.stem}`), and name the folder or one of the files"
    )


def _beside_data(name: str) -> bool:
    return name.lower().startswith(BY_MACOS) or PurePosixPath(name).name.lower().startswith(NO_DATA)


class _Bounded(io.RawIOBase):
    """A stream of unpacked bytes that ends with an error where there are too many of them."""

    def __init__(self, path: Path, inner: Any):
        self.inner, self.read_so_far = inner, 0
        self.most = max(ALWAYS_ALLOWED, MOST_TIMES * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            found = self.inner.read(len(buffer))
        except (OSError, *_SPOILT) as error:
            if isinstance(error, OSError) and error.strerror:
                raise
            raise _spoilt(error) from error
        self.read_so_far += len(found)
        if self.read_so_far > self.most:
            raise PackedError(
                f"what is inside has over {self.most / 2**30:,.0f} GiB, more than {MOST_TIMES} times the file's own "
                "size, as data never have. Name another file, or unpack it yourself if it is right"
            )
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        self.inner.close()
        super().close()


class _InArchive(io.RawIOBase):
    """The only member of a ZIP archive, which is closed with it."""

    def __init__(self, path: Path):
        try:
            self.archive = zipfile.ZipFile(path)
            with ExitStack() as unless_opened:
                unless_opened.callback(self.archive.close)
                self.member = self.archive.open(only_member(self.archive, path))
                unless_opened.pop_all()
        except _SPOILT as error:
            raise _spoilt(error) from error

    def read(self, size: int = -1) -> bytes:
        return self.member.read(size)

    def close(self) -> None:
        self.member.close()
        self.archive.close()
        super().close()


def _gzip(path: Path) -> Any:
    return gzip.GzipFile(path, "rb")


def _bz2(path: Path) -> Any:
    return bz2.BZ2File(path, "rb")


def _xz(path: Path) -> Any:
    return lzma.LZMAFile(path, "rb")


def _zstd(path: Path) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")


_READERS: dict[str, Callable[[Path], Any]] = {
    ".gz": _gzip,
    ".bz2": _bz2,
    ".xz": _xz,
    ".zst": _zstd,
    ".zip": _InArchive,
}
