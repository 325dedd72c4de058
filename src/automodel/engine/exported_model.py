"""Where a run's weights are when it says that they are saved: on the disk.

The last checkpoint and the exported model have the same weights and are written side by side, which is the longest wait
of a short run: 19.8 GB, 9 s, for 1.2 billion parameters. So only the checkpoint is waited for. The model's large files
lie in the page cache until the system writes them out, half a minute later at most. What a power cut leaves of them
before that is noticed (`RunFolder.holds_model`), and `--resume` exports once more.
"""

from __future__ import annotations

from automodel.checkpoint.disk import flush_to_disk
from automodel.checkpoint.store import CheckpointStore
from automodel.engine.folder import RunFolder


def wait_for_disk(checkpoints: CheckpointStore, folder: RunFolder, step: int | None) -> None:
    """Returns once the weights of `step`, which were exported (None: none were), are on the disk: in their checkpoint,
    or, where that could not be written, in the files of the model."""
    try:
        checkpoints.wait()
    finally:
        if step is not None and checkpoints.at(step) is None:
            for name in folder.exported():
                flush_to_disk(folder.root / name)
