"""Resumable checkpoints: complete or absent, never half.

`run/steps/step-00000120/` holds one `.safetensors` file for each group of tensors, `state.json` for everything else,
and `manifest.json` with the size and SHA-256 of both. It is written under a temporary name, flushed to the disk, and
renamed; `LATEST` is replaced the same way. A process killed at any moment leaves either the whole checkpoint or an
unfinished temporary folder, which the next start removes. Nothing is ever pickled.

The store knows nothing about models or optimizers: it keeps named tensors and JSON. That is what makes it fit for
sharded state later.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

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


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep_last: int = 2):
        self.folder = folder
        self.keep_last = keep_last

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        protect: Iterable[int] = (),
    ) -> Checkpoint:
        """Writes a checkpoint, then drops old ones; steps in `protect` (the best one) are kept whatever their age."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / _name(step)
        temporary = self.folder / f".unfinished-{_name(step)}-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for group, named in tensors.items():
            # Views (tied or flat parameters) are written as tensors of their own.
            save_file(
                {k: t.detach().contiguous().clone() for k, t in named.items()}, temporary / f"{group}.safetensors"
            )
        (temporary / STATE).write_text(json.dumps(state))
        files = {p.name: {"size": p.stat().st_size, "sha256": _digest(p)} for p in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps({"version": 1, "step": step, "files": files}, indent=2))
        for path in temporary.iterdir():
            flush_to_disk(path)
        if target.exists():  # an earlier, possibly damaged save of the same step
            shutil.rmtree(target)
        os.replace(temporary, target)
        flush_to_disk(self.folder)
        replace_text(self.folder / "LATEST", _name(step) + "\n")
        self._drop_old(set(protect) | {step})
        return Checkpoint(step, target)

    def complete(self) -> list[Checkpoint]:
        """Every finished checkpoint, oldest first. A finished one has its manifest: it was renamed into place."""
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
        for leftover in self.folder.glob(".unfinished-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _drop_old(self, protected: set[int]) -> None:
        kept = {c.step for c in self.complete()[-self.keep_last :]} | protected
        for checkpoint in self.complete():
            if checkpoint.step not in kept:
                # Renamed first: a kill in the middle must not leave a folder that looks complete.
                doomed = self.folder / f".unfinished-drop-{checkpoint.folder.name}"
                os.replace(checkpoint.folder, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    """Writes a small file so that readers see either the old or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    flush_to_disk(temporary)
    os.replace(temporary, path)


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
