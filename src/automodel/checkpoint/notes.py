"""How the ranks of a sharded checkpoint tell each other what they have written: by small files in its temporary folder.

Their writing threads cannot talk through the process group, whose order of calls belongs to training.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from automodel.checkpoint.disk import Written, replace_text
from automodel.config.json_text import parse_json

NOTE = ".rank-{rank:05d}.json"
PATIENCE = 1800.0
"""Seconds that the first rank waits for the others' notes once its own files are written."""


def leave_files(folder: Path, rank: int, files: Mapping[str, Written]) -> None:
    """What a rank has written."""
    _leave(folder, rank, {"files": {name: asdict(file) for name, file in files.items()}})


def leave_problem(folder: Path, rank: int, problem: str) -> None:
    """Why a rank could not write its part."""
    _leave(folder, rank, {"problem": problem})


def files_of_all(folder: Path, ranks: int, abandoned: threading.Event) -> dict[str, Written]:
    """Waits for the notes of all ranks. Raises what one of them could not write."""
    files: dict[str, Written] = {}
    patience = time.monotonic() + PATIENCE
    for rank in range(ranks):
        path = folder / NOTE.format(rank=rank)
        while not path.exists():
            if abandoned.wait(0.02):
                raise OSError(f"rank {rank} did not finish its part")
            if time.monotonic() > patience:
                raise OSError(f"rank {rank} wrote nothing for {PATIENCE:.0f} s; all ranks must see this folder")
        note = parse_json(path.read_text())
        if "problem" in note:
            raise OSError(f"rank {rank}: {note['problem']}")
        files |= {name: Written(**entry) for name, entry in note["files"].items()}
        path.unlink()
    return files


def _leave(folder: Path, rank: int, note: dict[str, object]) -> None:
    replace_text(folder / NOTE.format(rank=rank), json.dumps(note))
