"""`TokenStore`: tokenised samples in flat arrays on disk, memory-mapped.

A store is a folder named after the hash of everything that went into it (content, tokenizer, settings: see
fingerprint.py), so an existing folder is by definition the right one and the second start of a run tokenises nothing.

    meta.json            what the arrays are, their checksums, and the statistics of the data; written last
    input_ids.npy        uint16 where the vocabulary fits, else int32; offsets.npy (int64, N + 1) cuts it into samples
    rows.npy             int64, row of the dataset each sample comes from
    token_labels.npy     int32, one for each token (language models, token classification)
    token_types.npy      uint8, one for each token (text pairs)
    labels.npy           one for each sample (text classification)
    target_ids.npy, target_offsets.npy    (seq2seq)

A folder appears by one `rename` of a finished temporary folder: a killed process leaves nothing half-written under the
final name, and of two processes that build the same store the second finds the first one's and uses it. A folder whose
sizes or checksums do not agree with its meta.json is damaged and is rebuilt.

Reading never touches single tokens in Python: a batch is a handful of slices and one `concatenate`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from automodel.config.errors import UserError
from automodel.config.json_text import parse_json
from automodel.config.own_files import OutsideError, file_inside
from automodel.data.fingerprint import digest
from automodel.data.samples import Samples

FORMAT = 1  # raise it when the layout changes; older folders are then rebuilt
UINT16_VOCABULARY = 2**16
CHECKSUM_LIMIT = 2**30  # stores above 1 GiB are checked by size and structure only: reading them all costs seconds
STALE_AFTER_S = 24 * 3600  # a temporary folder this old was left behind by a killed process

_ARRAYS = ("input_ids", "offsets", "rows", "token_labels", "token_types", "labels", "target_ids", "target_offsets")


class DamagedStore(Exception):
    """The folder's files do not agree with each other. It is rebuilt, so users never see this."""


class TokenStore:
    """Samples by number. Iterating over it is not how it is read: collators slice its arrays."""

    def __init__(self, arrays: dict[str, np.ndarray], meta: dict[str, Any], folder: Path | None = None):
        self.folder = folder
        self.meta = meta
        """Whatever the builder recorded: statistics, label names, problem type."""
        self.input_ids = arrays["input_ids"]
        self.offsets = arrays["offsets"]
        self.rows = arrays["rows"]
        self.token_labels = arrays.get("token_labels")
        self.token_types = arrays.get("token_types")
        self.labels = arrays.get("labels")
        self.target_ids = arrays.get("target_ids")
        self.target_offsets = arrays.get("target_offsets")
        self.lengths = np.diff(self.offsets)
        """int64 (N,): tokens of each sample."""

    def __len__(self) -> int:
        return len(self.lengths)

    def place(self, index: int) -> tuple[int, slice]:
        """A sample's number, counted from the end where it is negative, and where its tokens lie."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return index, slice(int(self.offsets[index]), int(self.offsets[index + 1]))

    def __reduce__(self):
        """Travels to a spawned process as the folder's name, never as a copy of the arrays."""
        if self.folder is None:
            arrays = {name: getattr(self, name) for name in _ARRAYS if getattr(self, name) is not None}
            return TokenStore, (arrays, self.meta)
        return TokenStore.open, (self.folder, False)

    @property
    def key(self) -> str:
        """The store's name: a hash of all that decides what is in it, the version of the encoders included."""
        return str(self.meta.get("key", ""))

    @property
    def content(self) -> str:
        """A hash of the samples themselves, for resuming: it outlives changes of encoders that change none of them."""
        files = self.meta.get("files")
        if not files:
            return self.key
        return digest(sorted((name, f["shape"], f["dtype"], f["crc32"]) for name, f in files.items()))

    def is_that_of(self, noted: str) -> bool:
        """Whether these are the samples that a checkpoint noted: by their content, or, as earlier versions did, by the
        name of their store, which mostly still lies beside this one."""
        if noted in (self.content, self.key) or self.folder is None:
            return noted in (self.content, self.key)
        with contextlib.suppress(OSError, DamagedStore, OutsideError):
            beside = file_inside(self.folder.parent, noted, "the checkpoint")
            return TokenStore.open(beside, verify=False).content == self.content
        return False

    @property
    def target_lengths(self) -> np.ndarray | None:
        return None if self.target_offsets is None else np.diff(self.target_offsets)

    @classmethod
    def in_memory(cls, samples: Samples, meta: dict[str, Any] | None = None) -> TokenStore:
        """A store without a folder, for tests and small experiments."""
        arrays = {name: array for name, array in _as_arrays(samples).items() if array is not None}
        arrays["offsets"] = _offsets(samples.lengths)
        if samples.target_lengths is not None:
            arrays["target_offsets"] = _offsets(samples.target_lengths)
        return cls(arrays, meta or {"key": f"{_crc(arrays['input_ids']):08x}-{len(samples)}"})

    @classmethod
    def open(cls, folder: Path | str, verify: bool = True) -> TokenStore:
        """Maps an existing store. Raises FileNotFoundError, or DamagedStore where its files do not agree."""
        folder = Path(folder)
        try:
            meta = parse_json((folder / "meta.json").read_text(encoding="utf-8"))
            files = meta["files"]
        except FileNotFoundError:
            if folder.is_dir():
                raise DamagedStore(f"{folder} has no meta.json") from None
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedStore(f"{folder / 'meta.json'} cannot be read: {error}") from error
        if meta.get("format") != FORMAT:
            raise DamagedStore(f"{folder} was written in layout {meta.get('format')}, this is {FORMAT}")
        if not set(files) <= set(_ARRAYS):
            raise DamagedStore(f"{folder} names arrays that no store has")
        arrays = {name: _mapped(folder / f"{name}.npy", about) for name, about in files.items()}
        if verify:
            _verify(folder, arrays, files)
        return cls(arrays, meta, folder)


def open_or_build(
    folder: Path, build: Callable[[], tuple[Iterable[Samples], Callable[[], dict[str, Any]]]], vocabulary: int
) -> tuple[TokenStore, bool]:
    """The store in `folder`, built first where it is absent or damaged; and whether it was there already.

    `build` returns the chunks to write and a function that gives the meta once all of them were taken.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, DamagedStore):
        return TokenStore.open(folder), True
    temporary = folder.parent / f"{folder.name}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        temporary.mkdir()
    except OSError as error:
        raise unwritable(folder.parent, error.strerror or str(error)) from error
    try:
        chunks, meta = build()
        _write(temporary, chunks, meta, vocabulary)
        _move_into_place(temporary, folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):  # the rows may come from a network
            raise
        raise unwritable(folder.parent, error.strerror or str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return TokenStore.open(folder, verify=False), False


def unwritable(cache: Path, reason: str) -> UserError:
    """A cache on a full or read-only disk."""
    return UserError(
        f"the cache folder {cache} cannot be written: {reason}. Make room, or name another one with dataset.cache_dir "
        "or the environment variable AUTOMODEL_CACHE."
    )


def _as_arrays(samples: Samples) -> dict[str, np.ndarray | None]:
    return {
        "input_ids": samples.input_ids,
        "rows": samples.rows,
        "token_labels": samples.token_labels,
        "token_types": samples.token_types,
        "labels": samples.labels,
        "target_ids": samples.target_ids,
    }


def _offsets(lengths: np.ndarray | Sequence[np.ndarray]) -> np.ndarray:
    lengths = np.concatenate(lengths) if isinstance(lengths, list) else np.asarray(lengths)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _write(folder: Path, chunks: Iterable[Samples], meta: Callable[[], dict[str, Any]], vocabulary: int) -> None:
    ids_dtype = np.uint16 if vocabulary <= UINT16_VOCABULARY else np.int32
    writers: dict[str, _ArrayWriter] = {}
    lengths: list[np.ndarray] = []
    target_lengths: list[np.ndarray] = []
    for chunk in chunks:
        if len(chunk) == 0:
            continue
        lengths.append(chunk.lengths)
        if chunk.target_lengths is not None:
            target_lengths.append(chunk.target_lengths)
        for name, array in _as_arrays(chunk).items():
            if array is None:
                continue
            if name not in writers:
                dtype = np.dtype(ids_dtype if name in ("input_ids", "target_ids") else array.dtype)
                writers[name] = _ArrayWriter(folder / f"{name}.npy", dtype, array.shape[1:])
            writers[name].append(array)
    described = meta()  # raises the errors collected over all rows, before anything else is written
    files = {name: writer.close() for name, writer in writers.items()}
    for name, parts in (("offsets", lengths), ("target_offsets", target_lengths)):
        if parts:
            writer = _ArrayWriter(folder / f"{name}.npy", np.dtype(np.int64), ())
            writer.append(_offsets(parts))
            files[name] = writer.close()
    with open(folder / "meta.json", "w", encoding="utf-8") as out:
        json.dump({**described, "format": FORMAT, "files": files}, out)
        out.flush()
        os.fsync(out.fileno())


class _ArrayWriter:
    """Appends to a .npy file whose final length is not known yet. numpy leaves room in the header for a longer shape,
    so the header is written twice: empty at first, with the true length at the end."""

    def __init__(self, path: Path, dtype: np.dtype, tail: tuple[int, ...]):
        self.file: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed in close()
        self.dtype, self.tail = dtype, tail
        self.length, self.checksum = 0, 0
        self._header()

    def _header(self) -> None:
        described = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": described, "fortran_order": False, "shape": (self.length, *self.tail)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array, dtype=self.dtype)
        self.checksum = zlib.crc32(data.data, self.checksum)
        self.file.write(data.data.cast("B"))
        self.length += len(data)

    def close(self) -> dict[str, Any]:
        size = self.file.tell()
        self.file.seek(0)
        self._header()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {"shape": [self.length, *self.tail], "dtype": self.dtype.str, "bytes": size, "crc32": self.checksum}


def _mapped(path: Path, about: dict[str, Any]) -> np.ndarray:
    try:
        if path.stat().st_size != about["bytes"]:
            raise DamagedStore(f"{path} has {path.stat().st_size} bytes, not {about['bytes']}")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedStore(f"{path} cannot be read: {error}") from error
    if list(array.shape) != about["shape"] or array.dtype.str != about["dtype"]:
        raise DamagedStore(f"{path} holds {array.dtype} {array.shape}, not {about['dtype']} {about['shape']}")
    return array.view(np.ndarray)  # slicing numpy's memmap class costs several times as much


def _verify(folder: Path, arrays: dict[str, np.ndarray], files: dict[str, Any]) -> None:
    if not {"input_ids", "offsets", "rows"} <= arrays.keys():
        raise DamagedStore(f"{folder} lacks arrays")
    if sum(about["bytes"] for about in files.values()) <= CHECKSUM_LIMIT:
        for name, array in arrays.items():
            if _crc(array) != files[name]["crc32"]:
                raise DamagedStore(f"{folder / name}.npy does not match its checksum")
    for offsets, ids in (("offsets", "input_ids"), ("target_offsets", "target_ids")):
        if offsets in arrays and int(arrays[offsets][-1]) != len(arrays[ids]):
            raise DamagedStore(f"{folder}: {offsets} and {ids} do not agree")


def _crc(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data)


def _move_into_place(temporary: Path, folder: Path) -> None:
    """One rename. Another process may have got there first: its folder is as good as ours, unless it is damaged."""
    for _ in range(10):
        try:
            os.rename(temporary, folder)
            return
        except OSError:
            try:
                TokenStore.open(folder)
                return
            except FileNotFoundError:
                continue  # it vanished in between: try again
            except DamagedStore:
                aside = folder.parent / f"{folder.name}.tmp-damaged-{uuid.uuid4().hex[:8]}"
                with contextlib.suppress(OSError):
                    os.rename(folder, aside)
                    shutil.rmtree(aside, ignore_errors=True)
    os.rename(temporary, folder)


def _sweep(parent: Path) -> None:
    """Removes what killed processes left behind long ago."""
    for leftover in parent.glob("*.tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > STALE_AFTER_S:
                shutil.rmtree(leftover, ignore_errors=True)
