"""`metrics.jsonl`: the run's own record, one JSON object a line.

    {"step": 50, "epoch": 0.4, "split": "train", "time": 12.3, "loss": 0.61, "lr": 4.8e-05, …}

Each line is flushed when it is written, so a killed process loses at most the line it was writing; the reader
tolerates such a torn last line. A resumed run first removes the lines past its checkpoint: those steps are about to be
done again, and a curve with two values for a step would be a lie. The file is replaced in one rename, so being killed
during that loses nothing either.

JSON has no NaN; a diverged loss is written as the string "NaN" (or "Infinity"), so that every JSON reader can read the
file, and comes back from `read_metrics` as a float.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from automodel.config.errors import UserError
from automodel.config.own_files import for_the_owner

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlTracker:
    """Appends to `metrics.jsonl`. `time` is the run's: a resumed run goes on from where it stopped. Who gives it counts
    the earlier parts in (`earlier_parts`); where it is left to the tracker, the tracker does."""

    name = "metrics.jsonl"

    def __init__(self, path: Path, resume_step: int | None = None):
        self.path = Path(path)
        self.resume_step = resume_step
        self._file: IO[str] | None = None
        self._started = 0.0
        self._earlier_s = 0.0

    def start(self, run_dir: Path, config: dict[str, Any], plan: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.resume_step is None:
            self.path.unlink(missing_ok=True)  # whether a folder may be started over is not decided here
        else:
            kept = remove_steps_after(self.path, self.resume_step)
            self._earlier_s = _last_time(kept)
        self._started = time.monotonic()
        self._file = open(self.path, "a", encoding="utf-8", opener=for_the_owner)  # noqa: SIM115  (closed by `finish`)

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        if self._file is None:
            raise RuntimeError("log() before start()")
        line: dict[str, Any] = {"step": step}
        if "epoch" in values:
            line["epoch"] = values["epoch"]
        seconds = values.get("time", self._earlier_s + time.monotonic() - self._started)
        line |= {"split": split, "time": round(seconds, 3)}
        line |= {name: _plain(value) for name, value in values.items() if name not in line}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def finish(self, summary: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; empty if there is no file. A torn last line is left out.

    A broken line anywhere else means that the file was damaged, and is an error."""
    path = Path(path)
    if not path.exists():
        return []
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                raise ValueError("not an object with a step")
        except ValueError as error:
            if number == len(texts):  # no newline after it: the process was killed while writing
                break
            raise UserError(f"{path}:{number}: not a metrics line ({error}); remove the line or the file") from error
        lines.append(
            {name: _NOT_FINITE.get(value, value) if name != "split" else value for name, value in line.items()}
        )
    return lines


@dataclass(frozen=True)
class EarlierParts:
    """What a run cost before it was resumed."""

    seconds: float = 0.0
    peak_memory_gib: float = 0.0


def earlier_parts(path: Path, summary: dict[str, Any] | None) -> EarlierParts:
    """Time and memory of all earlier parts of a run: of the steps, too, that are taken a second time because no
    checkpoint has them. `summary`: what `summary.json` holds, where the last part came to its end."""
    lines = read_metrics(path)
    ended = summary or {}
    memory = [float(line["memory_gib"]) for line in lines if "memory_gib" in line]
    return EarlierParts(
        max(_last_time(lines), float(ended.get("wall_s") or 0.0)),
        max([*memory, float(ended.get("peak_memory_gib") or 0.0)], default=0.0),
    )


def missing_history(path: Path, step: int, log_every: int) -> str | None:
    """What to say where the file of a run that goes on after `step` has lost lines: it is gone, or was cut. Two log
    steps are left out: their lines are written late, so that a kill may cost them."""
    last = max((line["step"] for line in read_metrics(path)), default=0)
    if step - last <= 2 * log_every:
        return None
    if last == 0:
        return f"{path} is missing or empty: what was logged up to step {step} is lost to the report."
    return f"{path} ends at step {last}: what was logged from there to step {step} is lost to the report."


def _last_time(lines: list[dict[str, Any]]) -> float:
    return max((line.get("time", 0.0) for line in lines), default=0.0)


def remove_steps_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Rewrite the file without the lines past `step` (and without a torn last line); return what is kept."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    if not Path(path).exists():
        return kept
    temporary = Path(f"{path}.tmp")
    with open(temporary, "w", encoding="utf-8", opener=for_the_owner) as file:
        for line in kept:
            file.write(json.dumps({name: _plain(value) for name, value in line.items()}, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return kept


def _plain(value: Any) -> Any:
    """A value JSON can hold: numpy and tensor scalars become numbers, NaN and infinities their names."""
    if isinstance(value, str | bool | int) or value is None:
        return value
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
