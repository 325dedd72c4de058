"""Starting the sides, one process after the other, and collecting what they measured.

Every side gets a fresh process, so imports, compilation caches in memory and allocator state of one never help or hurt
another. With several repeats the sides take turns (A B A B), so a machine that grows warmer or busier does it to all;
of each side the run with the median training time is reported, and the spread is kept. What a side of Trainer is to be
tried with (`trial.py`) is tried before the first of its runs, once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel.benchmark.job import Job
from automodel.benchmark.side import STARTED, Request
from automodel.benchmark.sides import Side, TrainerSettings, Tried
from automodel.checkpoint.disk import flush_to_disk

ERROR_LINES = 25


def run_sides(job: Job, sides: Sequence[Side], repeat: int, logs: Path, say: Any) -> dict[str, dict[str, Any]]:
    """Runs every side `repeat` times and returns its median run by name, under `runs` the others in short."""
    sides = with_trials(job, sides, logs, say)
    finished: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for number in range(1, repeat + 1):
        for side in sides:
            if any(run["status"] == "failed" for run in finished[side.name]):
                continue  # it will not do better the second time
            again = f" ({number} of {repeat})" if repeat > 1 else ""
            say(f"{side.label}{again} …")
            run = run_once(job, side, number, logs)
            finished[side.name].append(run)
            say(f"  {_in_short(run)}")
    return {name: median_run(runs) for name, runs in finished.items()}


def with_trials(job: Job, sides: Sequence[Side], logs: Path, say: Any) -> list[Side]:
    """The sides with the precision and the attention that were fastest when they were tried."""
    known: dict[TrainerSettings, tuple[Tried, ...]] = {}
    ready = []
    for side in sides:
        if side.trainer is not None and side.trainer.trial and not side.trainer.tried:
            alike = dataclasses.replace(side.trainer, compile=False)
            if alike not in known:
                say(f"{side.label}: trying precisions and attentions …")
                known[alike] = tried_out(job, side, logs, say)
            side = dataclasses.replace(side, trainer=dataclasses.replace(side.trainer, tried=known[alike]))
        ready.append(side)
    return ready


def tried_out(job: Job, side: Side, logs: Path, say: Any) -> tuple[Tried, ...]:
    """What the trial found. Where it fails, the side computes as the run does, with the attention of transformers'
    choice, and that is said."""
    name, log = f"{side.name}-trial", logs / f"{side.name}-trial.log"
    request, result = job.folder / f"{name}.request.json", job.folder / f"{name}.result.json"
    Request(job.folder, side, job.folder / "runs" / name, job.trust).write(request)
    ended = run_process(["-m", "automodel.benchmark.trial", str(request)], result, log)
    shutil.rmtree(job.folder / "runs" / name, ignore_errors=True)
    found = ended.value or []
    if not found:
        say(f"  the trial failed, so nothing is chosen for {side.label}; see {log}")
        return ()
    tried = tuple(Tried(**one) for one in found)
    say("  " + ", ".join(f"{one.precision} {one.attention} {one.ms:.1f} ms" for one in tried))
    return tried


def run_once(job: Job, side: Side, number: int, logs: Path) -> dict[str, Any]:
    """One run of one side in its own process. What it wrote (weights, checkpoints) is removed; its log is kept."""
    name, log = f"{side.name}-{number}", logs / f"{side.name}-{number}.log"
    request, result = job.folder / f"{name}.request.json", job.folder / f"{name}.result.json"
    output = job.folder / "runs" / name
    Request(job.folder, side, output, job.trust).write(request)
    ended = run_process(["-m", "automodel.benchmark.side", str(request)], result, log)
    flush = seconds_to_flush(output) if ended.code == 0 else 0.0
    shutil.rmtree(output, ignore_errors=True)
    if ended.value is None:
        return {
            "provider": side.name,
            "method": side.label,
            "status": "failed",
            "exit_code": ended.code,
            "error": _tail(log),
            "log": str(log),
        }
    # A run is over when its model is evaluated and saved. What the interpreter takes to leave is kept apart: Trainer's
    # loader processes take 40 s to end on some machines, which would flatter us.
    wall = ended.value["end_s"]
    return {**ended.value, "wall_s": wall, "exit_s": ended.seconds, "flush_s": flush, "log": str(log)}


@dataclass(frozen=True)
class Ended:
    """A measuring process that is over."""

    code: int
    seconds: float
    """From its start until the interpreter had left."""
    value: Any
    """What it wrote; None where it failed."""


def run_process(arguments: Sequence[str], result: Path, log: Path) -> Ended:
    """Runs `python ARGUMENTS RESULT` alone. The process learns when it was started, and writes JSON into `result`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        began = time.monotonic()
        environment = {**os.environ, STARTED: repr(began)}
        command = [sys.executable, *arguments, str(result)]
        code = subprocess.run(command, env=environment, stdout=sink, stderr=subprocess.STDOUT).returncode
        seconds = time.monotonic() - began
    value = json.loads(result.read_text(encoding="utf-8")) if code == 0 and result.exists() else None
    return Ended(code, seconds, value)


def seconds_to_flush(folder: Path) -> float:
    """What the disk still has to do before the files of a folder would outlive a power cut. Trainer leaves all of
    them to the system, this library the last checkpoint."""
    began = time.monotonic()
    for path in folder.rglob("*"):
        if path.is_file():
            with suppress(OSError):  # a measurement, for which nothing is given up
                flush_to_disk(path)
    return time.monotonic() - began


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run whose training time is the median (the faster of the two middle ones)."""
    failed = next((run for run in runs if run["status"] == "failed"), None)
    if failed is not None:
        return failed
    ordered = sorted(runs, key=lambda run: run["training_time"])
    short = ("training_time", "ms_per_step", "tokens_per_s", "wall_s", "peak_memory_gib")
    return {
        **ordered[(len(ordered) - 1) // 2],
        "runs": [{key: run[key] for key in short} for run in runs],
    }


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-ERROR_LINES:])


def _in_short(run: dict[str, Any]) -> str:
    if run["status"] == "failed":
        return f"failed with exit code {run['exit_code']}; see {run['log']}"
    return (
        f"{run['training_time']:.1f} s training, {run['ms_per_step']:.1f} ms a step, "
        f"{run['wall_s']:.1f} s from start to end"
    )
