"""`benchmark`: the whole comparison, from a config to tables, results and a report."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from automodel.benchmark.compare import agreement_lines, load_note, results_document, write_results
from automodel.benchmark.job import Job, make_job
from automodel.benchmark.ladder import ladder_sides, new_sides
from automodel.benchmark.launch import run_sides
from automodel.benchmark.machine import system_info
from automodel.benchmark.report import write_comparison_report
from automodel.benchmark.sides import AUTOMODEL, Side, sides_against
from automodel.benchmark.tables import comparison_table, ladder_table
from automodel.config.errors import EXIT_FAILED, EXIT_OK, UserError
from automodel.config.written import hide_in_setting
from automodel.plan.config import RunConfig

WORK = ".automodel-benchmark"  # weights and requests, in a folder where everything else is the user's
EXIT_BELOW_THRESHOLD = 4  # everything ran, but the speed-up is smaller than --speedup-threshold


@dataclass(frozen=True)
class Wishes:
    """What the command line asked for, beside the config."""

    against: tuple[str, ...] = ("hf-trainer",)
    output: Path = Path("benchmark")
    repeat: int = 1
    steps: int | None = None
    warmup: int | None = None
    threshold: float | None = None
    ladder: bool = False
    trust: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compared:
    """What a caller gets back."""

    sides: dict[str, dict[str, Any]]
    """What each side measured; failed ones have the status `failed` and no numbers."""
    document: dict[str, Any] | None
    """What the results file holds; None where this library or every opponent failed."""
    results: Path | None
    report: Path | None
    exit_code: int


def benchmark(cfg: RunConfig, wishes: Wishes, console: Console | None = None) -> Compared:
    """Compares this library with Trainer on one config. The first name of `against` is the baseline; where it fails,
    the next one is, so that what was measured is not lost (the exit code still says that a side failed)."""
    # A log file or a pipe has no width of its own; the table needs some.
    console = console or (Console() if sys.stdout.isatty() else Console(width=140))
    opponents = sides_against(list(wishes.against))
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("transformers.Trainer needs the package accelerate: pip install 'automodel-finetune[compare]'")
    wishes.output.mkdir(parents=True, exist_ok=True)
    work = wishes.output / WORK
    shutil.rmtree(work, ignore_errors=True)  # of a comparison that was killed
    try:
        console.print("Preparing: the same weights and the same tokens for every side …")
        job = make_job(cfg, work, steps=wishes.steps, warmup=wishes.warmup, trust=wishes.trust)
        return _compare(job, opponents, wishes, console)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # the logs stay


def _compare(job: Job, opponents: list[Side], wishes: Wishes, console: Console) -> Compared:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    logs = wishes.output / "logs"
    plan = job.prepared.plan
    say(
        f"{plan.total_steps} steps of {plan.micro_batch_size} × {plan.grad_acc_steps} examples, "
        f"{job.settings['warmup_steps']} of them warm-up"
    )
    measured = run_sides(job, [*opponents, AUTOMODEL], wishes.repeat, logs, say)
    rungs, missing = ladder_sides(job) if wishes.ladder else ([], [])
    climbed = run_sides(job, new_sides(rungs, set(measured)), wishes.repeat, logs, say) if rungs else {}
    failed = [side for side in (measured | climbed).values() if side["status"] == "failed"]
    for side in failed:
        say(f"\n{side['method']} failed:\n{side['error']}\n(whole log: {side['log']})")
    ours = measured[AUTOMODEL.name]
    theirs = [measured[side.name] for side in opponents if measured[side.name] not in failed]
    if ours in failed or not theirs:
        return Compared(measured, None, None, None, EXIT_FAILED)
    lost, disturbed = measured[opponents[0].name], load_note(job.settings, [*theirs, ours])
    notes = [*job.notes, *precision_notes(job.settings, theirs), *missing, *([disturbed] if disturbed else [])]
    if lost in failed:
        notes.append(f"{lost['method']} failed, so this is compared with {theirs[0]['method']}")
    document = results_document(job.settings, system_info(), theirs[0], ours, theirs[1:], notes, command_line())
    ladder = [{**(measured | climbed)[side.name], "rung": side.label} for side in rungs]
    if ladder:
        document["ladder"] = ladder
    _show(document, theirs, ours, ladder, console, say)
    results = write_results(wishes.output, document)
    report = write_comparison_report(wishes.output, document)
    say(f"\nResults: {results}\nReport:  {report}")
    verdict = _verdict(document, wishes.threshold, say)
    return Compared(measured, document, results, report, EXIT_FAILED if failed else verdict)


def precision_notes(job: dict[str, Any], theirs: Sequence[dict[str, Any]]) -> list[str]:
    """Why the tuned sides compute as they do, and what was tried for it."""
    notes = []
    for side in theirs:
        tried = side.get("tried") or []
        if len(tried) > 1:
            times = ", ".join(f"{one['precision']} {one['attention']} {one['ms']:.1f} ms" for one in tried)
            notes.append(f"{side['method']} uses what was fastest here, forward and backward of a batch: {times}")
    if job["asked_precision"] and any(side.get("tried") for side in theirs):
        said = f"{job['asked_precision']} asks for {job['precision']}"
        notes.append(f"{said}, so the tuned Trainer computes in {job['precision']}, whatever is faster")
    return notes


def command_line() -> str:
    """The command as a person would type it, whatever started this process; without secrets, since files keep it."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *map(hide_in_setting, sys.argv[1:])])


def _show(
    document: dict[str, Any],
    theirs: Sequence[dict[str, Any]],
    ours: dict[str, Any],
    ladder: list[dict[str, Any]],
    console: Console,
    say: Any,
) -> None:
    console.print()
    console.print(comparison_table(theirs, ours))
    for side, found in zip(theirs, document["agreement"]):
        for line in agreement_lines(found, side["method"]):
            say(line)
    for note in document["notes"]:
        say(f"Note: {note}.")
    if ladder:
        console.print()
        console.print(ladder_table(ladder))


def _verdict(document: dict[str, Any], threshold: float | None, say: Any) -> int:
    found = document["results"]["improvements"]
    saved = found["cost_reduction_percent"]
    cost = f"{saved:.0f}% lower cost" if saved >= 0 else f"{-saved:.0f}% higher cost"
    say(
        f"Speedup: {found['speedup_factor']:.2f}x in training time, {found['step_speedup']:.2f}x a step, "
        f"{found['wall_speedup']:.2f}x from process start to end; {cost}"
    )
    if threshold is None:
        return EXIT_OK
    if found["speedup_factor"] < threshold:
        say(f"Below the threshold of {threshold:g}x: exit code {EXIT_BELOW_THRESHOLD}")
        return EXIT_BELOW_THRESHOLD
    say(f"At or above the threshold of {threshold:g}x")
    return EXIT_OK
