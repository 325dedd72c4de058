"""Room on the disk, found out before step 1: a run that cannot write its first checkpoint should not train to it.
What a disk does not take at the end, when others have filled it meanwhile, is said in words (`written_at_the_end`).

One checkpoint and the model at the end must fit, or the run is refused. The next checkpoint is written before an old
one is removed, so `keep_last` of them, the best and one more lie there at times; where that many do not fit, the run
says so and starts.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from automodel.checkpoint.disk import in_words
from automodel.checkpoint.store import CheckpointStore, SaveFailedError, last_saved
from automodel.config.errors import UserError
from automodel.engine.step import Named
from automodel.plan.config import RunConfig

STATES = {"adamw": 2, "lion": 1, "muon": 1, "rmsprop": 1, "adagrad": 1}
"""Numbers an optimizer keeps for each that is trained; what has none here is taken for 0, so as to refuse nothing that
would fit."""


def check_room(cfg: RunConfig, steps: Path, step: Any, kind: Any) -> str | None:
    """Raises `UserError` where a checkpoint would not fit; returns a warning where they soon would not. `kind`: the
    optimizer by name (`optim/kinds.py`), None where it is a class of the user's."""
    weights = step.weights()
    one = _bytes(weights) + _state_bytes(step, weights, kind)
    export = _bytes(weights)
    place = steps
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < one + export:
        raise UserError(
            f"checkpoint.checkpoint_dir: {cfg.checkpoint.checkpoint_dir} has {_in_words(free)} free; a checkpoint "
            f"takes {_in_words(one)} and the model at the end {_in_words(export)}. Make room, name a folder "
            "on another disk, or train without: checkpoint.enabled=false"
        )
    most = (cfg.checkpoint.keep_last + 1 + cfg.checkpoint.keep_best) * one + export
    there = sum(path.stat().st_size for path in steps.rglob("*") if path.is_file()) if steps.exists() else 0
    if free + there < most:
        return (
            f"{cfg.checkpoint.checkpoint_dir} has {_in_words(free)} free, and checkpoint.keep_last: "
            f"{cfg.checkpoint.keep_last} takes up to {_in_words(most)} ({_in_words(one)} each, one more while it is "
            "written, and the model). Lower keep_last, or make room."
        )
    return None


def _state_bytes(step: Any, weights: Named, kind: Any) -> int:
    """What the optimizer adds; before its first step it may have nothing to show yet."""
    shown = _bytes(step.state()[0])
    expected = 0
    if kind is not None:
        trained = [p for p in step.model.parameters() if p.requires_grad]
        each = STATES.get(kind.algorithm, 0)
        expected = sum(each * (p.numel() if kind.bits == 8 else p.numel() * p.element_size()) for p in trained)
    return max(shown, expected)


def _bytes(tensors: Named) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _in_words(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


@contextmanager
def written_at_the_end(what: str, folder: Path, checkpoints: CheckpointStore | None) -> Generator[None]:
    """What the disk does not take inside the block, as an error for people: training is over, and not in vain."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and "I/O error" not in str(error):
            raise
        kept = last_saved(checkpoints)
        then = (
            "There is no checkpoint to continue from."
            if kept is None
            else f"The checkpoint of step {kept} is kept: make room, and --resume continues after it."
        )
        why = str(error).rpartition("I/O error: ")[2] if isinstance(error, SafetensorError) else in_words(error)
        raise SaveFailedError(f"{what} could not be written to {folder}: {why}. {then}") from error
