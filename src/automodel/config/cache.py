"""Where the program keeps what it has made or found out, so that the next process need not."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$AUTOMODEL_CACHE`, or `~/.cache/automodel`."""
    return Path(os.environ.get("AUTOMODEL_CACHE") or "~/.cache/automodel").expanduser()
