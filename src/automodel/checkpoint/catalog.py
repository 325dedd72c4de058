"""What lies in `run/steps/`: complete checkpoints, found, checked and removed.

    step-00000120/
        model.safetensors, optimizer.safetensors, rng.safetensors   tensors, a file for each group; or several
        optimizer-00001-of-00008.safetensors, …                     of a large one; or one for each rank
        model-rank-00003-of-00004.safetensors, …                    of a sharded one (`parts.py`)
        state.json                                                  everything else
        manifest.json                                               size and SHA-256 of each file, and of itself
    LATEST                                                          the name of the newest complete one

A folder of that name is complete: it was renamed into place when its last byte was on the disk or, at the end of a
run, with the system (`store.py`). Whether it is still whole is what `verify` finds out. Removing goes the other way
round, by a name that nobody takes for a checkpoint, so that a kill in the middle leaves nothing that looks like one.

No torch is imported before tensors are read: `automodel checkpoint ls` answers at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel.checkpoint.disk import Written, digest_of, flush_to_disk, replace_text
from automodel.config.errors import UserError
from automodel.config.json_text import parse_json
from automodel.config.own_files import OutsideError, file_inside

if TYPE_CHECKING:
    from torch import Tensor

    from automodel.checkpoint.parts import SavedTensor

MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "LATEST"
UNFINISHED = ".unfinished-"
NAME = re.compile(r"step-\d{8,}")
IDLE_S = 3600.0
"""Seconds without a change after which another machine does not write an unfinished checkpoint any more."""
VERSION = 3
"""1 had no rank files, and no hash of the manifest itself; 2 had one file for each group. Both are read as well."""


class DamagedCheckpointError(UserError):
    """A checkpoint whose files do not match its manifest."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    folder: Path

    def tensors(self, group: str) -> dict[str, Tensor]:
        """The whole tensors of a group, in the host's memory."""
        from automodel.checkpoint.parts import read_whole

        return read_whole(self.folder, group)

    def parts(self, group: str) -> Mapping[str, SavedTensor]:
        """The same tensors as they lie on the disk: each has a `shape`, and `[slices]` reads that part of it."""
        from automodel.checkpoint.parts import SavedGroup

        return SavedGroup(self.folder, group)

    def state(self) -> dict[str, Any]:
        return parse_json((self.folder / STATE).read_text())

    def manifest(self) -> dict[str, Any]:
        """Raises `DamagedCheckpointError` where it cannot be read, or was changed."""
        path = self.folder / MANIFEST
        if not self.folder.is_dir():
            raise DamagedCheckpointError(f"{self.folder} is missing.")
        if not path.exists():
            raise DamagedCheckpointError(f"{path} is missing.")
        try:
            manifest = parse_json(path.read_bytes())
            sealed = manifest.pop("sha256", None)
            files = {name: Written(**entry) for name, entry in manifest["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
        try:
            for name in files:
                file_inside(self.folder, name, path)
        except OutsideError as error:
            raise DamagedCheckpointError(str(error)) from error
        if sealed not in (None, _seal(manifest)):
            raise DamagedCheckpointError(f"{path} was changed after it was written (SHA-256 differs).")
        if manifest["version"] > VERSION:
            raise DamagedCheckpointError(
                f"{path} is of version {manifest['version']}; this automodel reads versions 1 to {VERSION}."
            )
        return {**manifest, "files": files}

    def files(self) -> dict[str, Written]:
        return self.manifest()["files"]

    def size(self) -> int:
        """Bytes of all files, by the manifest."""
        return sum(file.size for file in self.files().values())

    def check_sizes(self, names: Iterable[str] | None = None) -> None:
        """Raises `DamagedCheckpointError` naming a file that is missing or truncated; reads none."""
        files = self.files()
        for name in files if names is None else names:
            path = self.folder / name
            if not path.exists():
                raise DamagedCheckpointError(f"{path} is missing.")
            size = path.stat().st_size
            if size != files[name].size:
                raise DamagedCheckpointError(f"{path} has {size:,} bytes instead of {files[name].size:,}.")

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Raises `DamagedCheckpointError` naming the file that is missing, truncated or changed."""
        files = self.files()
        chosen = list(files if names is None else names)
        self.check_sizes(chosen)
        with ThreadPoolExecutor(4) as threads:  # hashing leaves Python's lock alone
            digests = threads.map(lambda name: digest_of(self.folder / name), chosen)
            changed = [name for name, digest in zip(chosen, digests, strict=True) if digest != files[name].sha256]
        if changed:
            path = self.folder / changed[0]
            raise DamagedCheckpointError(f"{path} was changed after it was written (SHA-256 differs).")


def damage_of(checkpoint: Checkpoint, share: int = 0, of: int = 1) -> str:
    """What is wrong with a share of its files (every `of`-th); nothing where they are whole."""
    try:
        checkpoint.verify(list(checkpoint.files())[share::of])
    except DamagedCheckpointError as error:
        return str(error)
    return ""


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def complete(folder: Path) -> list[Checkpoint]:
    """Every finished checkpoint, oldest first. It was whole when it got its name: one without a manifest is damaged.
    Somebody's copy under another name (`step-00000120.bak`) is none of ours."""
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted((Checkpoint(int(path.name.removeprefix("step-")), path) for path in found), key=lambda c: c.step)


def lost(folder: Path) -> Checkpoint | None:
    """The one that `LATEST` names, where its folder is gone and all others are older: somebody removed it."""
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    if not NAME.fullmatch(name):
        return None
    named = Checkpoint(int(name.removeprefix("step-")), folder / name)
    return named if all(other.step < named.step for other in complete(folder)) else None


def seem_whole(folder: Path) -> list[Checkpoint]:
    """Those without damage that can be seen without reading them, oldest first."""

    def fine(checkpoint: Checkpoint) -> bool:
        with suppress(DamagedCheckpointError, OSError):
            checkpoint.check_sizes()
            return True
        return False

    return [checkpoint for checkpoint in complete(folder) if fine(checkpoint)]


def manifest_text(step: int, files: Mapping[str, Written], ranks: int) -> str:
    """What a manifest says, closed with its own hash."""
    described = {name: asdict(files[name]) for name in sorted(files)}
    manifest = {"version": VERSION, "step": step, "ranks": ranks, "files": described}
    return json.dumps({**manifest, "sha256": _seal(manifest)}, indent=2)


def point_latest(folder: Path, step: int) -> None:
    replace_text(folder / LATEST, name_of(step) + "\n")


def retire(folder: Path) -> None:
    """Removes a checkpoint, which is none any more the moment this begins."""
    if folder.is_symlink():  # what it leads to is not of this run
        folder.unlink(missing_ok=True)
        return
    doomed = folder.with_name(f"{UNFINISHED}drop-{folder.name}-{platform.node()}-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(FileNotFoundError):  # somebody prunes at the same time
        os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def too_old(
    folder: Path, keep_last: int, protected: Iterable[int], damaged: Iterable[int] = (), coming: Iterable[int] = ()
) -> list[Checkpoint]:
    """All but the last ones and the protected. Damaged ones (`damaged`, and what can be seen) take nobody's place;
    those that lie ahead of the run are left for it to replace. `coming`: steps that will be there."""
    seen = {checkpoint.step for checkpoint in seem_whole(folder)} - set(damaged)
    whole = sorted(seen.union(coming))
    kept = {*whole[-keep_last:], *protected}
    return [c for c in complete(folder) if c.step not in kept and whole and c.step < whole[-1]]


def bring_to_disk(folder: Path) -> None:
    """Returns once the files of a checkpoint are on the disk, where those of a run's end may not be yet."""
    for path in folder.glob("*.safetensors"):
        with suppress(FileNotFoundError):  # somebody prunes at the same time
            flush_to_disk(path)


def unfinished(folder: Path, step: int) -> Path:
    """A name for a checkpoint that is being written, which says by which process of which machine."""
    process = f"{platform.node()}-{os.getpid()}-{time.monotonic_ns()}"
    return folder / f"{UNFINISHED}{name_of(step)}-{process}"


def hold(folder: Path) -> int | None:
    """Tells other processes of this machine that the folder is being written, until `let_go` or the end of this
    process, however it ends. None where the file system has no such locks; `BlockingIOError` where another process
    writes it."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def make_held(folder: Path) -> int | None:
    """Makes the folder of a checkpoint that is about to be written, and holds it as `hold` does. It has its lock before
    it has its name, or a `prune` at this moment would take it for what a killed save left behind."""
    without_name = folder.with_name(f".new{folder.name}")
    without_name.mkdir(parents=True)
    held = hold(without_name)
    try:
        os.rename(without_name, folder)
    except OSError:
        let_go(held)
        raise
    return held


def let_go(held: int | None) -> None:
    """The end of `hold`, for processes that were forked meanwhile as well."""
    if held is None:
        return
    import fcntl

    with suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_UN)
    os.close(held)


def left_behind(folder: Path, idle: float = 0.0) -> list[Path]:
    """What killed saves left behind, never what a living process of this machine writes. What another machine began
    counts only after `idle` seconds without a change: its locks need not be seen here."""
    return [path for path in sorted(folder.glob(f"{UNFINISHED}*")) if _is_left_behind(path, idle)]


def _is_left_behind(path: Path, idle: float) -> bool:
    try:
        held = hold(path)
    except BlockingIOError:
        return False
    let_go(held)
    of_this_machine = held is not None and f"-{platform.node()}-" in path.name
    return of_this_machine or not idle or time.time() - _last_change(path) > idle


def clean(folder: Path, idle: float = 0.0) -> None:
    """Removes what killed saves left behind; `idle` as for `left_behind`."""
    for leftover in left_behind(folder, idle):
        shutil.rmtree(leftover, ignore_errors=True)


def _last_change(folder: Path) -> float:
    changes = [0.0]
    for path in (folder, *folder.glob("*")):
        with suppress(FileNotFoundError):  # it has just been renamed into place
            changes.append(path.stat().st_mtime)
    return max(changes)


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
