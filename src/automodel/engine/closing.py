"""The last lines of a run: what it cost, what it reached, and the commands that come next, in full."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel.config.gate import REMOTE_DATA, trust_arguments
from automodel.metrics.progress import duration, format_memory, format_value, title

if TYPE_CHECKING:
    from automodel.engine.build import Run


def cost_line(run: Run, summary: dict[str, Any]) -> str:
    """`Took 3 min 42 s, 3 min 10 s of it training; peak GPU memory 6.2GB`, over all parts of a resumed run."""
    kind = "GPU memory" if run.prepared.plan.device == "cuda" else "host memory"
    parts = [f"Took {duration(summary['wall_s'])}, {duration(summary['train_s'])} of it training"]
    if summary["peak_memory_gib"]:
        parts.append(f"peak {kind} {format_memory(summary['peak_memory_gib'])}")
    return "; ".join(parts)


def best_line(summary: dict[str, Any]) -> str | None:
    """`Best evaluation: Accuracy 0.874, after step 50 of 60`; none where nothing was measured."""
    best = summary["best"]
    if best is None:
        return None
    reached = f"{title(best['metric'])} {format_value(best['value'])}"
    return f"Best evaluation: {reached}, after step {best['step']} of {summary['steps']}"


def next_lines(run: Run, stopped_early: bool) -> list[str]:
    """What to type now that the model is saved."""
    return [f"Predict:  {predict_command(run)}", f"Train on: {longer_command(run, stopped_early)}"]


def predict_command(run: Run) -> str:
    """Asks the saved model, with as many texts as it was trained on."""
    folder = shown(run.folder.root)
    text = run.prepared.task.example
    command = f"{this_command()} predict {shlex.quote(folder)} {shlex.quote(text)}"
    if (run.prepared.train.layout or {}).get("pair"):
        command += f" --pair {shlex.quote('A second text.')}"
    return command + _trusted(run.prepared.trust, but=REMOTE_DATA)  # it reads no data of the run


def resume_command(run: Run) -> str:
    """Continues this run after its last checkpoint."""
    config = shlex.quote(shown(run.folder.config))
    return f"{this_command()} finetune llm -c {config} --resume{_trusted(run.prepared.trust)}"


def longer_command(run: Run, stopped_early: bool) -> str:
    """Trains a finished run for longer: to its planned end where it was stopped early, otherwise an epoch more, or half
    as many steps again where steps were asked for."""
    schedule, plan = run.prepared.cfg.step_scheduler, run.prepared.plan
    if stopped_early:
        more = ["early_stopping=null"]
    elif schedule.max_steps is None:
        more = [f"step_scheduler.num_epochs={round(plan.num_epochs) + 1}"]
    else:
        more = [f"step_scheduler.max_steps={plan.total_steps + max(1, plan.total_steps // 2)}"]
        if schedule.num_epochs is not None:  # the smaller of the two would end the run where it ended before
            more.append("step_scheduler.num_epochs=null")
    return f"{resume_command(run)} {' '.join(more)}"


def _trusted(trust: Sequence[str], but: str = "") -> str:
    kept = [package for package in trust if package != but]
    return "".join(f" {shlex.quote(argument)}" for argument in trust_arguments(kept))


def shown(path: Path) -> str:
    """A path as a command needs it: `./reviews`, not a name that could be a hub model's."""
    text = str(path)
    return text if path.is_absolute() or text.startswith((".", "~")) else f"./{text}"


def this_command() -> str:
    """How to call this program again from here: by its name where that finds it, by its path in a `.venv` otherwise."""
    if shutil.which("automodel"):
        return "automodel"
    own = Path(sys.argv[0]).name == "automodel"
    return shlex.quote(os.path.relpath(sys.argv[0])) if own else "python -m automodel"


def process_started() -> float:
    """When this process began, on `time.perf_counter`'s clock: imports count for the person who waits."""
    import psutil

    return time.perf_counter() - (time.time() - psutil.Process().create_time())
