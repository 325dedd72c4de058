"""What a test can know of a disk: which files somebody waited for."""

import os
from collections.abc import Callable
from pathlib import Path


def note_flushes(monkeypatch, note: Callable[[Path], None]) -> None:
    """Hands every file and folder that is flushed from now on to `note`, and flushes it."""
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        note(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
