"""Where a run's weights are when it says that they are saved: on the disk.

The exported model has the weights of a checkpoint, mostly of the last one, and both are written side by side, which is
the longest wait of a short run: 19.8 GB, 9 s, for 1.2 billion parameters. So only the checkpoint is waited for. The
model's large files lie in the page cache until the system writes them out, usually within a minute. What a power cut
leaves of them before that is noticed where they are short (`RunFolder.left_short`), and `--resume` exports once more.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from automodel.checkpoint.disk import flush_to_disk
from automodel.engine.folder import RunFolder

if TYPE_CHECKING:  # `checkpoint prune` need not wait for torch
    from automodel.checkpoint.store import CheckpointStore


def wait_for_disk(checkpoints: CheckpointStore, folder: RunFolder, step: int | None) -> None:
    """Returns once the weights of `step`, which were exported (None: not by this rank), are on the disk: in their
    checkpoint, or, where that could not be written, is an older one or lies on another disk, in the model's files."""
    try:
        checkpoints.wait()
    except BaseException:
        with suppress(OSError):  # the checkpoint's own trouble is what is told
            _flush(folder, step)
        raise
    if step not in checkpoints.sealed or folder.steps.stat().st_dev != folder.root.stat().st_dev:
        _flush(folder, step)


def flush_model(folder: RunFolder) -> None:
    """Returns once the exported model is on the disk."""
    for name in folder.exported():
        with suppress(FileNotFoundError):  # moved away meanwhile
            flush_to_disk(folder.root / name)


def _flush(folder: RunFolder, step: int | None) -> None:
    if step is not None:
        flush_model(folder)
