"""`automodel checkpoint ls|verify|prune|convert RUN`: the resumable checkpoints of a run."""

from __future__ import annotations

import json
import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from automodel.cli.options import RemoteData, Trust, allowed
from automodel.config.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from automodel.checkpoint.catalog import Checkpoint


class Verbs(TyperGroup):
    """Says what can be done, where something else is asked for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            known = ", ".join(self.commands)
            raise UserError(f"`automodel checkpoint {args[0]}` is not known. It does: {known}.")
        return super().resolve_command(ctx, args)


app = typer.Typer(no_args_is_help=True, help="List, check, thin out and convert the checkpoints of a run.", cls=Verbs)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder (checkpoint.checkpoint_dir).")]
Step = Annotated[int | None, typer.Option("--step", help="The checkpoint of this step.")]


@app.callback()
def checkpoint() -> None:
    """List, check, thin out and convert the checkpoints of a run."""


@app.command("ls")
def ls(run: Run, as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False) -> None:
    """List the checkpoints of a run."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    steps, every = _found(run)
    newest = next((checkpoint for checkpoint in reversed(every) if not _problem(checkpoint)), every[-1])
    rows = [_described(checkpoint, newest.step, _best_of(newest)) for checkpoint in every]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(title=Text(str(steps)), title_justify="left", title_style="", box=None, pad_edge=False)
    for name, justify in (("step", "right"), ("epoch", "right"), ("written", "left"), ("size", "right")):
        table.add_column(name, justify=justify)
    for name in ("ranks", "files", ""):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(
            str(row["step"]),
            "" if row["epoch"] is None else f"{row['epoch']:.2f}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["written"])) if row["written"] else "?",
            _size(row["bytes"]) if row["bytes"] is not None else "?",
            str(row["ranks"] or "?"),
            str(row["files"] or "?"),
            ", ".join([*row["marks"], *([row["problem"].removeprefix(f"{steps}/")] if row["problem"] else [])]),
        )
    Console(soft_wrap=True).print(table)


@app.command("verify")
def verify(run: Run, step: Step = None) -> None:
    """Read every file again and compare it with its hash; exit code 1 where one differs."""
    from automodel.checkpoint.catalog import DamagedCheckpointError

    _, every = _found(run)
    damaged = 0
    for checkpoint in [_chosen(every, step)] if step is not None else every:
        try:
            checkpoint.verify()
        except DamagedCheckpointError as error:
            damaged += 1
            print(f"step {checkpoint.step}: DAMAGED. {error}")
        else:
            print(f"step {checkpoint.step}: whole, {len(checkpoint.files())} files, {_size(checkpoint.size())}")
    if damaged:
        whole = len(every) - damaged
        print("--resume takes the newest that is whole." if whole else "None is whole: --resume cannot continue.")
        raise typer.Exit(EXIT_FAILED)


@app.command("prune")
def prune(
    run: Run,
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many of the newest to keep.")] = 1,
    drop_best: Annotated[
        bool, typer.Option("--drop-best", help="Remove the best one too, unless it is among them.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove old checkpoints; the newest, and the best evaluation's, are kept."""
    from automodel.checkpoint import catalog

    steps, every = _found(run, of_killed_saves=True)
    _refuse_link_outside(run, steps)
    left = catalog.left_behind(steps, catalog.IDLE_S)  # the run may be training and saving
    if left and not every:  # killed in its first save
        if not dry_run:
            catalog.clean(steps, catalog.IDLE_S)
        print(_left_in_words(left, sum(map(_bytes_in, left)), dry_run))
        return
    whole = _newest_whole(every, keep)
    if not whole:
        raise UserError(
            f"no checkpoint in {steps} is whole, so none is removed. automodel checkpoint verify "
            f"{shlex.quote(str(run))}"
        )
    best = _best_of(whole[-1])
    kept = {checkpoint.step for checkpoint in whole} | ({best} if best is not None and not drop_best else set())
    doomed = [checkpoint for checkpoint in every if checkpoint.step not in kept and checkpoint.folder.is_dir()]
    freed = sum(_bytes_in(checkpoint.folder) for checkpoint in doomed)
    left_bytes = sum(map(_bytes_in, left))
    if not dry_run:
        catalog.bring_to_disk(whole[-1].folder)  # before anything goes for its sake
        catalog.point_latest(steps, whole[-1].step)  # before anything it could name is gone
        for checkpoint in doomed:
            catalog.retire(checkpoint.folder)
        catalog.clean(steps, catalog.IDLE_S)
    what = ", ".join(str(checkpoint.step) for checkpoint in doomed) or "none"
    print(f"{'Would remove' if dry_run else 'Removed'} steps: {what} ({_size(freed)}); kept: {sorted(kept)}")
    if left:
        print(_left_in_words(left, left_bytes, dry_run))


@app.command("convert")
def convert(
    run: Run,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; must be new or empty.")],
    step: Step = None,
    trust: Trust = None,
    allow_remote_data: RemoteData = False,
) -> None:
    """Write the model of a checkpoint as a plain Hugging Face folder."""
    _, every = _found(run)
    if step is not None:
        _chosen(every, step)
    from automodel.models.lean_imports import import_transformers

    import_transformers()
    from automodel.engine.convert import convert_checkpoint

    done = convert_checkpoint(run, out, step=step, trust=allowed(trust, allow_remote_data))
    for note in done.notes:
        print(note)
    print(f"Wrote the {done.kind} of step {done.step} to {done.folder}")


def _left_in_words(left: list[Path], size: int, dry_run: bool) -> str:
    """What killed saves left behind."""
    count = f"{len(left)} unfinished checkpoint{'s' if len(left) > 1 else ''} of killed saves"
    return f"{'Would remove' if dry_run else 'Removed'} {count} ({_size(size)})"


def _refuse_link_outside(run: Path, steps: Path) -> None:
    """A link that came with a copied folder may lead to the checkpoints of another run."""
    if run.resolve() not in (steps.resolve(), *steps.resolve().parents):
        raise UserError(
            f"{steps} is a link that leads out of {run}, to {steps.resolve()}. Nothing was removed. If these are the "
            "checkpoints that you mean, give that folder: automodel checkpoint prune "
            f"{shlex.quote(str(steps.resolve()))}"
        )


def _found(run: Path, of_killed_saves: bool = False) -> tuple[Path, list[Checkpoint]]:
    """The folder of the checkpoints and all of them, with the newest where only `LATEST` knows of it any more; a
    `UserError` where there are none. `of_killed_saves`: a folder that has only what killed saves left there is one."""
    from automodel.checkpoint.catalog import IDLE_S, complete, left_behind, lost

    if not run.is_dir():
        raise UserError(f"there is no folder '{run}'. Give the run folder (checkpoint.checkpoint_dir).")
    places = [run / "run" / "steps", run / "steps", run]  # whoever gives a folder further inside means the same
    for steps in places:
        gone = lost(steps)
        every = [*complete(steps), *([gone] if gone else [])]
        if every or (of_killed_saves and left_behind(steps, IDLE_S)):
            return steps, every
    where = places[0]
    hint = (
        " The run saved none (checkpoint.enabled: false), or has not come to its first."
        if where.parent.is_dir()
        else ""
    )
    raise UserError(f"there is no checkpoint in '{where}'.{hint}")


def _chosen(every: list[Checkpoint], step: int) -> Checkpoint:
    for checkpoint in every:
        if checkpoint.step == step:
            return checkpoint
    raise UserError(
        f"--step: there is no checkpoint of step {step}. There are: {', '.join(str(c.step) for c in every)}."
    )


def _described(checkpoint: Checkpoint, newest: int, best: int | None) -> dict[str, Any]:
    marks = [name for name, step in (("latest", newest), ("best", best)) if step == checkpoint.step]
    row: dict[str, Any] = {
        "step": checkpoint.step,
        "epoch": _state_of(checkpoint).get("train", {}).get("epoch"),
        "written": checkpoint.folder.stat().st_mtime if checkpoint.folder.is_dir() else None,
        "bytes": None,
        "ranks": None,
        "files": None,
        "marks": marks,
        "problem": _problem(checkpoint),
    }
    if not row["problem"]:
        manifest = checkpoint.manifest()
        row |= {"bytes": checkpoint.size(), "ranks": manifest.get("ranks", 1), "files": len(manifest["files"])}
    return row


def _newest_whole(every: list[Checkpoint], count: int) -> list[Checkpoint]:
    """So many of the newest whose every byte is as it was written, oldest first. What is removed cannot be had again,
    so what stays is read before."""
    whole: list[Checkpoint] = []
    for checkpoint in reversed(every):
        if len(whole) < count and not _problem(checkpoint, contents=True):
            whole.insert(0, checkpoint)
    return whole


def _problem(checkpoint: Checkpoint, contents: bool = False) -> str:
    """What is wrong at first sight: sizes. `contents`: at second sight, too."""
    from automodel.checkpoint.catalog import DamagedCheckpointError

    try:
        checkpoint.verify() if contents else checkpoint.check_sizes()
    except DamagedCheckpointError as error:
        return str(error)
    return ""


def _state_of(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        state = checkpoint.state()
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def _best_of(checkpoint: Checkpoint) -> int | None:
    """The step of the best evaluation, as the checkpoint remembers it."""
    with suppress(AttributeError):  # damaged
        return _state_of(checkpoint).get("train", {}).get("best", {}).get("step")
    return None


def _bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
