"""A folder that is complete or absent: exports and converted checkpoints.

All files are written into `NAME.automodel-unfinished` beside the folder, flushed, and the folder takes its name in one
rename. A process that was killed before the rename leaves that folder behind; the next attempt with the same name
removes it. A lock on it, which ends with its process, tells the two apart.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from automodel.checkpoint.catalog import hold, let_go
from automodel.checkpoint.disk import flush_to_disk
from automodel.config.errors import UserError
from automodel.config.writable import require_writable

UNFINISHED = ".automodel-unfinished"


def check_new(target: Path) -> None:
    """Raises `UserError` where a folder of this name cannot be made. Cheap: callers ask before they load a model."""
    require_writable(_beside(target), "--out")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--out: '{target}' exists and is not empty. Name another folder.")
    if os.path.ismount(target):
        raise UserError(f"--out: a disk is mounted at '{target}'. Name a folder inside it, e.g. {target}/model")


@contextmanager
def new_folder(target: Path) -> Generator[Path]:
    """Gives the folder to write into. It becomes `target` at the end of the block, and is removed after an error."""
    check_new(target)
    target, beside = target.resolve(), _beside(target)
    beside.mkdir(parents=True, exist_ok=True)
    try:
        held = hold(beside)
    except BlockingIOError as error:
        raise UserError(
            f"--out: another process is writing '{target}'. Wait for it, or name another folder."
        ) from error
    try:
        for path in beside.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield beside
        for path in (*beside.rglob("*"), beside):
            flush_to_disk(path)
        os.replace(beside, target)
        flush_to_disk(target.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    finally:
        let_go(held)


def _beside(target: Path) -> Path:
    target = target.resolve()
    return target.with_name(target.name + UNFINISHED)
