"""Whether something can be written at a path, asked before work is done for it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from automodel.config.errors import UserError


def require_writable(path: Path, key: str) -> None:
    """Raises `UserError` where neither a file nor a folder of this name can be made. `key`: what named it."""
    existing = path
    try:
        while not existing.exists():
            existing = existing.parent
        folder = existing.parent if existing == path and existing.is_file() else existing
        with tempfile.TemporaryFile(dir=folder):  # asking for permissions says nothing about read-only disks
            pass
    except OSError as error:
        raise UserError(
            f"{key}: nothing can be written to {existing} ({error.strerror}). Choose another folder."
        ) from error
