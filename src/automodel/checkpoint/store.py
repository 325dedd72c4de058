"""Resumable checkpoints: complete or absent, never half.

`run/steps/step-00000120/` holds one `.safetensors` file for each group of tensors, `state.json` for everything else,
and `manifest.json` with the size and SHA-256 of both. It is written under a temporary name, flushed to the disk, and
renamed; `LATEST` is replaced the same way. A process killed at any moment leaves either the whole checkpoint or an
unfinished temporary folder, which the next start removes. Nothing is ever pickled.

Training need not wait for the disk: `begin` copies the tensors into the host's memory, which takes a tenth of a second
for each gigabyte or less, and writes them in the background. Whoever asks the store for checkpoints waits until that is
done, and `wait` raises what went wrong.

The store knows nothing about models or optimizers: it keeps named tensors and JSON. That is what makes it fit for
sharded state later.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor

from automodel.checkpoint.tensor_file import Written, write_tensors
from automodel.config.errors import UserError

MANIFEST = "manifest.json"
STATE = "state.json"


class DamagedCheckpointError(UserError):
    """A checkpoint whose files do not match its manifest."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    folder: Path

    def tensors(self, group: str, device: str = "cpu") -> dict[str, Tensor]:
        return load_file(self.folder / f"{group}.safetensors", device=device)

    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / STATE).read_text())

    def verify(self) -> None:
        """Raises `DamagedCheckpointError` naming the file that is missing, truncated or changed."""
        try:
            manifest = json.loads((self.folder / MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(f"{self.folder / MANIFEST} cannot be read: {error}") from error
        for name, entry in manifest["files"].items():
            path = self.folder / name
            if not path.exists():
                raise DamagedCheckpointError(f"{path} is missing.")
            size = path.stat().st_size
            if size != entry["size"]:
                raise DamagedCheckpointError(f"{path} has {size:,} bytes instead of {entry['size']:,}.")
            if _digest(path) != entry["sha256"]:
                raise DamagedCheckpointError(f"{path} was changed after it was written (SHA-256 differs).")


Groups = Mapping[str, Mapping[str, Tensor]]
"""Tensors by group (a file each) and name."""


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep_last: int = 2):
        self.folder = folder
        self.keep_last = keep_last
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # finishes before Python ends
        self._writing: Future[Checkpoint] | None = None

    def save(self, step: int, tensors: Groups, state: Mapping[str, Any], protect: Iterable[int] = ()) -> Checkpoint:
        """Writes a checkpoint, then drops old ones; steps in `protect` (the best one) are kept whatever their age."""
        self.wait()
        _let_devices_finish(tensors)
        return self._write(step, tensors, json.dumps(state), set(protect))

    def begin(self, step: int, tensors: Groups, state: Mapping[str, Any], protect: Iterable[int] = ()) -> None:
        """As `save`, but returns when the tensors have been copied. Without room for a copy it is `save`."""
        self.wait()
        _let_devices_finish(tensors)
        text, protected = json.dumps(state), set(protect)
        size = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
        if size > psutil.virtual_memory().available // 2:
            self._write(step, tensors, text, protected)
            return
        self._writing = self._background.submit(self._write, step, _copied(tensors), text, protected)

    def wait(self) -> None:
        """Returns once nothing is being written, or raises why that failed."""
        if self._writing is not None:
            try:
                self._writing.result()
            finally:
                if self._writing.done():  # not where Ctrl-C ended the wait
                    self._writing = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Leaves the block when nothing is being written any more. An error that ends it is not replaced by another."""
        if kind is None:
            self.wait()
        else:
            self.complete()

    def _write(self, step: int, tensors: Groups, state: str, protected: set[int]) -> Checkpoint:
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / _name(step)
        temporary = self.folder / f".unfinished-{_name(step)}-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            _fill(temporary, step, tensors, state)
        except OSError:  # most often a full disk, which half a checkpoint would keep full
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if target.exists():  # an earlier, possibly damaged save of the same step
            shutil.rmtree(target)
        os.replace(temporary, target)
        flush_to_disk(self.folder)
        replace_text(self.folder / "LATEST", _name(step) + "\n")
        self._drop_old(protected | {step})
        return Checkpoint(step, target)

    def complete(self) -> list[Checkpoint]:
        """Every finished checkpoint, oldest first. A finished one has its manifest: it was renamed into place."""
        if self._writing is not None:
            wait_for([self._writing])
        return self._complete()

    def _complete(self) -> list[Checkpoint]:
        found = [p for p in self.folder.glob("step-*") if (p / MANIFEST).exists()]
        return sorted((Checkpoint(int(p.name.removeprefix("step-")), p) for p in found), key=lambda c: c.step)

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and a message for each damaged one that was passed over."""
        self.clean()
        passed_over = []
        for checkpoint in reversed(self.complete()):
            try:
                checkpoint.verify()
            except DamagedCheckpointError as error:
                passed_over.append(f"{error} Falling back to the checkpoint before it.")
            else:
                return checkpoint, passed_over
        return None, passed_over

    def at(self, step: int) -> Checkpoint | None:
        return next((c for c in self.complete() if c.step == step), None)

    def clean(self) -> None:
        """Removes what a killed save left behind."""
        self.wait()
        for leftover in self.folder.glob(".unfinished-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _drop_old(self, protected: set[int]) -> None:
        kept = {c.step for c in self._complete()[-self.keep_last :]} | protected
        for checkpoint in self._complete():
            if checkpoint.step not in kept:
                # Renamed first: a kill in the middle must not leave a folder that looks complete.
                doomed = self.folder / f".unfinished-drop-{checkpoint.folder.name}"
                os.replace(checkpoint.folder, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _fill(folder: Path, step: int, tensors: Groups, state: str) -> None:
    """Everything of a checkpoint, on the disk; the files of the groups are written at once."""
    with ThreadPoolExecutor(len(tensors) or 1) as threads:
        paths = {group: folder / f"{group}.safetensors" for group in tensors}
        files = {path.name: threads.submit(write_tensors, path, tensors[group]) for group, path in paths.items()}
        written = {name: file.result() for name, file in files.items()}
    written[STATE] = _write_text(folder / STATE, state)
    described = {name: asdict(written[name]) for name in sorted(written)}
    _write_text(folder / MANIFEST, json.dumps({"version": 1, "step": step, "files": described}, indent=2))
    flush_to_disk(folder)


def replace_text(path: Path, text: str) -> None:
    """Writes a small file so that readers see either the old or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    flush_to_disk(temporary)
    os.replace(temporary, path)


def _let_devices_finish(tensors: Groups) -> None:
    """Other threads read the tensors, and do not know the stream that wrote them."""
    for device in {tensor.device for named in tensors.values() for tensor in named.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _copied(tensors: Groups) -> Groups:
    """The tensors as they are now, in the host's memory. Several at a time: new pages cost as much as the copying."""
    every = [(group, name, tensor) for group, named in tensors.items() for name, tensor in named.items()]
    with ThreadPoolExecutor(4) as threads:
        copies = threads.map(lambda item: item[2].detach().to("cpu", copy=True), every)
        copied: dict[str, dict[str, Tensor]] = {group: {} for group in tensors}
        for (group, name, _), copy in zip(every, copies, strict=True):
            copied[group][name] = copy
    return copied


def _write_text(path: Path, text: str) -> Written:
    data = text.encode()
    path.write_bytes(data)
    flush_to_disk(path)
    return Written(len(data), hashlib.sha256(data).hexdigest())


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(path: Path) -> None:
    """So that a rename never outlives the bytes it names. Folders too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
