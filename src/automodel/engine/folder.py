"""The run folder: a plain Hugging Face folder at its root, everything about the run in `run/`.

Nothing a user made is ever lost: a folder that holds another run, or files of someone else, is refused. `--resume`
continues the run in it, `--overwrite` removes exactly what the earlier run wrote. A run that saved no model and no
checkpoint (`checkpoint.enabled: false`) is put aside as `run.1`, `run.2`, … when the next one starts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel.checkpoint import catalog
from automodel.checkpoint.disk import is_whole, left_over_of, replace_text
from automodel.config.errors import UserError
from automodel.config.json_text import parse_json
from automodel.config.own_files import OutsideError, file_inside
from automodel.config.run_folders import MODEL_FILE
from automodel.config.writable import require_writable
from automodel.plan.config import RunConfig
from automodel.plan.places import run_folder_of
from automodel.plan.run_place import check_run_place, place_of, read_by

EXPORTED = "exported.json"  # names of the files that the export wrote into the root
BASE = "base.json"  # what tells the weights below an adapter from others
LAYOUT = "layout.json"  # how the model is asked
REMOVED = ".removed-run-"  # an earlier run that a new one is about to remove
WRITTEN_ANEW = ("plan.json", "summary.json", EXPORTED)  # by every start or end of a run


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def steps(self) -> Path:
        return self.run / "steps"

    @property
    def config(self) -> Path:
        return self.run / "config.yaml"

    def write_json(self, name: str, value: Any) -> None:
        replace_text(self.run / name, json.dumps(value, indent=2) + "\n", private=True)

    def make(self) -> None:
        """The folder `run/`, for its owner alone: what a run was told may hold a secret in spite of everything. The
        model beside it can be read as any file can."""
        self.run.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(OSError):  # of another owner, or a file system without modes
            self.run.chmod(0o700)

    def read_json(self, name: str) -> Any:
        """What was written under this name; None where it was not. A damaged file counts as none where the run writes
        it anew; what a saved model needs is worth an error."""
        path = self.run / name
        if not path.exists():
            return None
        try:
            value = parse_json(path.read_text())
        except ValueError:  # cut off, empty, or not even text
            value = None
        if isinstance(value, list if name == EXPORTED else dict):
            return value
        if name in WRITTEN_ANEW:
            return None
        raise UserError(f"{path} is damaged: it is no JSON object. Put back a copy of it, or remove it to do without.")

    def hand_on(self, to: Path, *names: str) -> None:
        """Notes that a model needs wherever it goes, written beside what was made of it in the folder `to`."""
        for name in names:
            note = self.read_json(name)
            if note is not None:
                RunFolder(to).make()
                RunFolder(to).write_json(name, note)

    def exported(self) -> list[str]:
        """Names of the files that the export wrote into the root. Raises `OutsideError` where the list names anything
        else: what it names is opened, and removed by `--overwrite`."""
        names = self.read_json(EXPORTED) or []
        for name in names:
            file_inside(self.root, name, self.run / EXPORTED, replaced=True)
            if Path(name).name != name:
                raise OutsideError(f"{self.run / EXPORTED} names '{name}', which no export writes. Remove that line.")
        return names

    def holds_run(self) -> bool:
        """One that was killed while it wrote its first file, the config, is none."""
        return self.run.is_dir() and set(self.run.iterdir()) != set(left_over_of(self.config))

    def holds_something_else(self) -> bool:
        """Whether `run/` has files, but none that a run writes: it belongs to somebody else."""
        return self.holds_run() and not any((self.run / name).exists() for name in ("config.yaml", "metrics.jsonl"))

    def is_complete(self, step: int) -> bool:
        """Whether the model of this step lies in the root. A kill between last step and export leaves it missing."""
        summary = self.read_json("summary.json") or {}
        ended = summary.get("status") != "interrupted" and summary.get("steps") == step
        return ended and self.is_exported()

    def is_exported(self) -> bool:
        """Whether a model was exported and no file of it is short. Whoever moved files of it away has them."""
        return bool(self.exported()) and not self.left_short()

    def left_short(self) -> list[str]:
        """Weights of the exported model that are shorter than they say."""
        weights = [name for name in self.exported() if name.endswith(".safetensors")]
        return [name for name in weights if (self.root / name).is_file() and not is_whole(self.root / name)]

    def is_throwaway(self) -> bool:
        """Whether the run in here kept neither a checkpoint nor a model."""
        return not self.exported() and not any(self.steps.glob("step-*"))


def open_folder(checkpoint_dir: str, *, resume: bool, overwrite: bool) -> RunFolder:
    """Checks that the run may live here, before anything expensive; writes nothing but the folder itself."""
    root = Path(checkpoint_dir).expanduser()
    folder = RunFolder(root)
    if root.exists() and not root.is_dir():
        raise UserError(f"checkpoint.checkpoint_dir: {root} is a file. Name a folder.")
    if folder.holds_something_else():
        raise UserError(
            f"{folder.run} holds files that no run of automodel wrote; they are not touched. Choose another folder: "
            "checkpoint.checkpoint_dir=./another"
        )
    if overwrite:
        _refuse_run_of_another(folder)
    if resume:
        if not folder.holds_run():
            raise UserError(f"--resume: there is no run in {root}. Start it without --resume, or name its folder.")
        return folder
    if folder.holds_run() and not overwrite and not folder.is_throwaway():
        raise UserError(
            f"{root} already holds a run. Continue it with --resume, replace it with --overwrite, or choose another "
            "folder: checkpoint.checkpoint_dir=./another"
        )
    foreign = _foreign_model_files(folder)
    if foreign:
        raise UserError(
            f"{root} holds a model that no run of automodel wrote there ({', '.join(foreign[:3])}); it is not "
            "overwritten. Choose another folder: checkpoint.checkpoint_dir=./another"
        )
    require_writable(root, "checkpoint.checkpoint_dir")
    return folder


def refuse_what_it_reads(cfg: RunConfig, resume: bool) -> None:
    """A new run takes the place of what an earlier one left in its folder, which must not be what it starts from: an
    adapter would be saved beside a base that is gone, and a run that is killed could not go on."""
    if resume:
        return
    folder = RunFolder(place_of(cfg.checkpoint.checkpoint_dir))
    for key, value, _ in read_by(cfg):
        place = place_of(value)
        if not place.exists():  # a name on the hub
            continue
        if folder.run in (place, *place.parents) or (place == folder.root and place.is_dir() and model_files(place)):
            raise UserError(
                f"{key}: '{value}' lies in the folder of the new run, which would take its place. Choose another "
                "folder: checkpoint.checkpoint_dir=./another"
            )
    check_run_place(cfg)


def start_fresh(folder: RunFolder) -> list[str]:
    """Makes room for a new run: removes what the earlier one wrote (it was `--overwrite`), or puts it aside. Returns
    what could not be removed, in words."""
    _remove_unfinished(folder)
    if folder.holds_run():
        if folder.is_throwaway():
            number = 1
            while (folder.root / f"run.{number}").exists():
                number += 1
            os.replace(folder.run, folder.root / f"run.{number}")
        else:
            _refuse_run_of_another(folder)
            for name in folder.exported():
                if MODEL_FILE.fullmatch(name):  # an export writes no other
                    (folder.root / name).unlink(missing_ok=True)
            _put_aside(folder)
    for left in left_over_of(folder.config):
        left.unlink()
    folder.make()  # a run that was killed in this very place left it empty
    return _remove_put_aside(folder.root)


def _refuse_run_of_another(folder: RunFolder) -> None:
    """`run` may be a link to a larger disk. It is emptied only where the config in there says that it is the run of
    this folder: a link that came with a copied folder may lead to anything."""
    if folder.run.is_symlink() and not _is_own(folder):
        raise UserError(
            f"--overwrite: {folder.run} is a link to {folder.run.resolve()}, whose config.yaml does not name "
            f"{folder.root} as its run folder. Nothing was removed. Remove the link, or choose another folder: "
            "checkpoint.checkpoint_dir=./another"
        )


def _is_own(folder: RunFolder) -> bool:
    """Whether the config in `run/` says that it is the run of this folder."""
    named = run_folder_of(folder.config)
    return named is not None and named.resolve() == folder.root.resolve()


def _remove_unfinished(folder: RunFolder) -> None:
    """What earlier runs that were killed while they saved have left: gigabytes that nothing reads. Runs that were put
    aside before are looked at as well."""
    if not folder.run.is_symlink() or _is_own(folder):
        catalog.clean(folder.steps)
    for run in folder.root.glob("run.*"):
        if not run.is_symlink():
            catalog.clean(run / "steps", catalog.IDLE_S)


def _put_aside(folder: RunFolder) -> None:
    """Out of the way at once: a kill amid removing would leave what nobody knows for a run. A link to another disk is
    the user's and stays; what it leads to is emptied, and what tells a run goes last."""
    if not folder.run.is_symlink():
        os.replace(folder.run, folder.root / f"{REMOVED}{os.getpid()}-{time.time_ns()}")
        return
    for path in sorted(folder.run.iterdir(), key=lambda path: path == folder.config):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove_put_aside(root: Path) -> list[str]:
    told = []
    for path in root.glob(f"{REMOVED}*"):
        if re.fullmatch(rf"{re.escape(REMOVED)}\d+-\d+", path.name) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                told.append(f"The earlier run could not be removed altogether; what is left of it lies in {path}.")
    return told


def model_files(root: Path) -> dict[str, tuple[int, int]]:
    """The files in a folder that belong to a saved model and tokenizer, each with what changes when it is replaced."""
    files = [p for p in root.iterdir() if p.is_file() and MODEL_FILE.fullmatch(p.name)]
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in files}


def _foreign_model_files(folder: RunFolder) -> list[str]:
    """Files in the root that an export would replace and no earlier run wrote."""
    if not folder.root.is_dir():
        return []
    ours = set(folder.exported())
    return sorted(name for name in model_files(folder.root) if name not in ours)
