"""The name of a token store: a hash of everything that decides what is in it.

- the **content** of the data: bytes of its files, never their dates, so that copying or touching a file changes nothing
  and editing it changes everything;
- the **tokenizer**: its serialised form, special tokens and chat template, wherever it was loaded from;
- the **settings** that reach the encoders, and the version of the encoders themselves.

Large files are hashed once: their digest is remembered beside the token stores under their identity on disk (path,
size, inode, times to the nanosecond, including the change time, which no program can set back).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ENCODERS = 30  # raise it when an encoder, or what reads the files, changes what is written
REMEMBER_FROM = 64 * 2**20  # smaller files are hashed every time, in well under 0.1 s
HASH_ROWS_UP_TO = 512 * 2**20  # above this, an in-memory dataset is known by its own fingerprint


def digest(*parts: Any) -> str:
    """A short, stable name for JSON-like values."""
    text = json.dumps(parts, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def files_digest(files: Iterable[Path], root: Path, memory: Path, named: bool) -> str:
    """Content of files in their order. `named` adds their names below `root`, where those are part of the data."""
    return digest([(os.path.relpath(file, root) if named else "", _file_digest(file, memory)) for file in files])


def _file_digest(file: Path, memory: Path) -> str:
    status = file.stat()
    if status.st_size < REMEMBER_FROM:
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    identity = digest(
        str(file.resolve()), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_dev
    )
    remembered = memory / "files" / identity
    with contextlib.suppress(OSError):
        text = remembered.read_text(encoding="ascii")
        if len(text) == 32:
            return text
    with open(file, "rb") as data:
        found = hashlib.file_digest(data, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    with contextlib.suppress(OSError):  # a cache that cannot be written is only slower
        remembered.parent.mkdir(parents=True, exist_ok=True)
        temporary = remembered.with_name(f"{identity}.{uuid.uuid4().hex[:8]}")
        temporary.write_text(found, encoding="ascii")
        os.replace(temporary, remembered)
    return found


def rows_digest(rows: Any) -> str:
    """Content of a dataset that came from somewhere else than plain files."""
    if rows.data.nbytes > HASH_ROWS_UP_TO:
        return digest("fingerprint", rows._fingerprint)
    found = hashlib.blake2b(repr(rows.features).encode(), digest_size=16)
    for batch in rows.with_format("arrow").iter(batch_size=10_000):
        for part in batch.combine_chunks().to_batches():
            found.update(part.serialize())
    return found.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """What a tokenizer does to a text, whatever it is called and wherever it was loaded from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()  # left over from the last call, set again by the next one
        backend.no_padding()
        body = backend.to_str()
    else:
        body = json.dumps([sorted(tokenizer.get_vocab().items()), _written_in_python(tokenizer)])
    return digest(
        type(tokenizer).__name__,
        hashlib.blake2b(body.encode(), digest_size=16).hexdigest(),
        {name: str(value) for name, value in tokenizer.special_tokens_map.items()},
        tokenizer.chat_template,
        tokenizer.truncation_side,
        bool(getattr(tokenizer, "add_prefix_space", False)),
        bool(getattr(tokenizer, "split_special_tokens", False)),
        *(getattr(tokenizer, name) for name in ("src_lang", "tgt_lang") if getattr(tokenizer, name, None)),
    )


def _written_in_python(tokenizer: Any) -> list[Any]:
    """What such a tokenizer does with a vocabulary: its settings, and files that are no vocabulary (merges)."""
    places = ("name_or_path", "_file", "_path", "_dir")
    settings = {name: str(value) for name, value in tokenizer.init_kwargs.items() if not name.endswith(places)}
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(Exception):  # not all of them can write their files
            tokenizer.save_vocabulary(folder)
        files = [
            hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in sorted(Path(folder).iterdir())
        ]
    return [sorted(settings.items()), files]
