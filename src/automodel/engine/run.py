"""`finetune`: one config in, a fine-tuned model out. `dry_run`: the plan alone."""

from __future__ import annotations

import collections
import json
import platform
import shlex
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from automodel.adapters.kept import KEPT, to_keep
from automodel.checkpoint.disk import replace_text
from automodel.checkpoint.store import last_saved
from automodel.config.dump import dump_config, to_plain, typed_at
from automodel.config.errors import EXIT_INTERRUPTED, EXIT_OK, Interrupted, UserError
from automodel.config.written import HIDDEN, as_written
from automodel.distributed.world import Alone, joined
from automodel.engine.best_model import exported_before, whole_checkpoint
from automodel.engine.build import Run, build
from automodel.engine.closing import best_line, cost_line, next_lines, resume_command
from automodel.engine.diverged import DivergedError
from automodel.engine.evaluate import evaluate_for_all
from automodel.engine.fit import out_of_memory
from automodel.engine.folder import (
    BASE,
    EXPORTED,
    LAYOUT,
    RunFolder,
    model_files,
    open_folder,
    refuse_what_it_reads,
    start_fresh,
)
from automodel.engine.heap import kept_heap
from automodel.engine.loop import Outcome, is_trained, only_evaluate, train
from automodel.engine.observe import NOBODY, Observer
from automodel.engine.one_writer import only_writer
from automodel.engine.prepare import Prepared
from automodel.engine.room import written_at_the_end
from automodel.engine.same_run import as_heard, check_same_run, plan_begun_with
from automodel.engine.signals import StopRequest
from automodel.engine.step import fp32_products
from automodel.engine.unasked_ranks import planned, prepare_or_step_aside
from automodel.engine.variables import VARIABLES, noted_variables
from automodel.metrics.progress import Progress
from automodel.metrics.report import write_report
from automodel.metrics.waiting import Waiting
from automodel.models.save import save_hf_folder
from automodel.plan.config import RunConfig
from automodel.plan.places import with_folder
from automodel.plan.ranks import Ranks
from automodel.plan.render import print_plan
from automodel.plan.run_place import check_run_place

NOTHING_YET = "Stopped before training began: nothing is lost, and nothing that was there is changed."


@dataclass(frozen=True)
class Finished:
    """What a caller gets back from `finetune`."""

    folder: Path
    summary: dict[str, Any]
    report: Path
    exit_code: int


def dry_run(
    cfg: RunConfig, *, trust: Sequence[str] = (), as_json: bool = False, ranks: Ranks | None = None
) -> Prepared:
    """Prints what a run would do, on so many ranks. Loads no weights and writes nothing but caches. Raises `UserError`
    where the memory that is there is not enough for any batch."""
    check_run_place(cfg)
    prepared = planned(cfg, trust, ranks)
    if as_json:
        print(json.dumps(prepared.plan.to_json(), indent=2))
    else:
        print_plan(prepared.plan)
    if prepared.plan.cannot_fit:
        raise UserError(prepared.plan.cannot_fit)
    return prepared


def finetune(
    cfg: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    trust: Sequence[str] = (),
    console: Any = None,
    observer: Observer | None = None,
    ranks: Alone | None = None,
    why_ranks: str = "",
    started: float | None = None,
    tells_next: bool = True,
) -> Finished:
    """Fine-tunes, saves and reports. Raises `UserError` for bad input before anything expensive happens. `ranks`: the
    processes that train together, where they have met already; otherwise they meet here (under torchrun). `why_ranks`:
    why so many, in words. `started`: when the person who waits began to, on `time.perf_counter`'s clock; now, where it
    is left out. `tells_next`: whether the last lines name the commands that come next."""
    started = time.perf_counter() if started is None else started
    if ranks is None:
        with joined() as ranks:
            return finetune(
                cfg, resume=resume, overwrite=overwrite, trust=trust, console=console, observer=observer, ranks=ranks,
                why_ranks=why_ranks, started=started, tells_next=tells_next,
            )  # fmt: skip
    console = console or Console()
    if not ranks.first:
        console = Console(quiet=True, force_terminal=False)
    if resume and overwrite:
        raise UserError("--resume continues a run and --overwrite replaces it; give one of them.")
    refuse_what_it_reads(cfg, resume)
    with _told(console, "Stopped."), only_writer(cfg.checkpoint.checkpoint_dir, ranks) as make_and_hold:
        options = {"resume": resume, "overwrite": overwrite}

        def open_now() -> RunFolder:
            opened = ranks.told(lambda: str(open_folder(cfg.checkpoint.checkpoint_dir, **options).root))
            return RunFolder(Path(opened))

        def begin() -> None:
            make_and_hold()
            open_now()  # another run may have begun there while this one was reading

        folder = open_now()
        if resume:
            check_same_run(cfg, folder)
        begun = ranks.told(lambda: plan_begun_with(folder)) if resume else None
        kept = ranks.told(lambda: folder.read_json(KEPT)) if resume else None
        cfg = as_heard(cfg, kept) if resume else cfg
        with _told(console, NOTHING_YET), Waiting(console) as waiting:
            waiting.begins("Reading the model and the data")
            prepared = prepare_or_step_aside(cfg, trust, begun, ranks, why_ranks, kept)
            waiting.ends()
            print_plan(prepared.plan, console)
            if prepared.plan.cannot_fit:  # an estimate: it is said, and the run goes on as far as it comes
                console.print(f"[WARN] {prepared.plan.cannot_fit}", style="yellow", markup=False, soft_wrap=True)
        tf32 = prepared.plan.device == "cuda" and (
            prepared.plan.precision == "tf32" or bool(cfg.training_optimizations.tf32)
        )
        with fp32_products(tf32), kept_heap(prepared.plan.device):
            return _carry_out(prepared, folder, begin, console, resume, started, observer or NOBODY, tells_next)


@contextmanager
def _told(console: Any, cost: str) -> Generator[None]:
    """Says what Ctrl-C has cost, where nobody inside has said it."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as interrupt:
        console.print(cost)
        raise Interrupted from interrupt


def _since_the_best(run: Run) -> str:
    best = run.state.best
    enough = f" by more than {best.min_delta:g}" if best.min_delta else ""
    return f"{best.metric} did not improve{enough} in {best.stale} evaluation{'s' if best.stale > 1 else ''}"


def _carry_out(
    prepared: Prepared,
    folder: RunFolder,
    begin: Callable[[], None],
    console: Any,
    resume: bool,
    started: float,
    observer: Observer,
    tells_next: bool,
) -> Finished:
    """Loads, trains, saves and reports: everything the plan says. `begin` makes the run folder this run's."""

    def progress_of(total: int, start: int) -> Progress:
        return Progress(
            total,
            start_step=start,
            console=console,
            device=prepared.plan.device,
            steps_per_epoch=prepared.plan.steps_per_epoch,
            epochs=prepared.plan.num_epochs,
        )

    with _told(console, NOTHING_YET), Waiting(console) as waiting:
        waiting.begins("Loading the weights")
        run = build(prepared, folder, progress_of, resume=resume, started=started, observer=observer)
    trained = is_trained(run)
    if trained and prepared.ranks.told(lambda: folder.is_complete(run.state.step)):
        if run.state.step < prepared.plan.total_steps:
            raise UserError(
                f"This run was stopped early after step {run.state.step}: {_since_the_best(run)}. To train further, "
                "raise early_stopping.patience on the command line, or take it away with early_stopping=null."
            )
        raise UserError(
            f"This run already finished its {run.state.step} steps. To train further, raise step_scheduler.max_steps "
            "or num_epochs on the command line; otherwise there is nothing to resume."
        )
    begin()
    if prepared.ranks.first:
        if not resume:
            # Only now: whatever could be wrong with the new run has not cost the old one.
            for problem in start_fresh(folder):
                console.print(as_written(problem), style="yellow", markup=False)
        _write_start(run)
    with StopRequest() as stop:
        done = _train_and_finish(run, observer, trained, stop, tells_next)
        # Whoever left while the first rank still exports would have no ear for the signal that all of them get.
        prepared.ranks.barrier()
    return done


def _train_and_finish(run: Run, observer: Observer, trained: bool, stop: StopRequest, tells_next: bool) -> Finished:
    """From the first step to the report. A signal that comes when training is over changes nothing: what is being
    written, the last checkpoint with it, is worth more than the moment that it takes."""
    prepared = run.prepared
    try:
        with run.progress, run.checkpoints or nullcontext():
            for line in _opening_lines(run):
                run.progress.info(line)
            try:
                outcome = only_evaluate(run) if trained else train(run, observer, stop)
            except DivergedError:  # every rank has the same loss, and so this error
                _close_unfinished(run, "diverged")
                prepared.ranks.barrier()
                raise
            except torch.OutOfMemoryError as error:
                _close_unfinished(run, "out of memory")  # other ranks may be waiting for this one
                raise out_of_memory(prepared, run.state.step, last_saved(run.checkpoints)) from error
            if not prepared.ranks.first:  # the first rank exports, reports and speaks
                if prepared.layout.fsdp and _exports(run, outcome):
                    _export(run, outcome)  # everyone has a part of the model
                code = EXIT_INTERRUPTED if outcome.status == "interrupted" else EXIT_OK
                return Finished(run.folder.root, {}, run.folder.run / "report.html", code)
            return _finish(run, outcome, stop, tells_next)
    except KeyboardInterrupt as interrupt:
        # The second one: the first asks politely. It may come in a step or while the end is written.
        kept = last_saved(run.checkpoints)
        where = "no checkpoint was saved yet" if kept is None else f"--resume continues after step {kept}"
        run.progress.warn(f"Stopped at once, in the middle of the work; {where}.")
        raise Interrupted from interrupt


def _close_unfinished(run: Run, status: str) -> None:
    """Trackers and report of a run that ends in an error, which is for the caller to raise."""
    if run.prepared.ranks.first:
        run.trackers.finish({"status": status, "steps": run.state.step})
        write_report(run.folder.run)


def _opening_lines(run: Run) -> list[str]:
    plan, prepared = run.prepared.plan, run.prepared
    attention = "packed attention" if plan.path == "packed" else "length-grouped padding"
    devices = "1 device" if plan.ranks == 1 else f"{plan.ranks} ranks"
    here = prepared.ranks.world.local_size
    elsewhere = plan.ranks > max(1, here)
    where = f"on {devices}, {here} of them on this machine" if elsewhere else f"locally on {devices}"
    lines = [f"Applied {attention} to model", f"Launching job {where}"]
    for role, data in (("dataset", prepared.train), ("validation_dataset", prepared.validation)):
        if data is not None and data.stats.skipped:
            lines.append(f"{role}: skipped {data.stats.skipped:,} of {data.stats.rows:,} rows (on_bad_row: skip)")
    if prepared.train.from_cache:
        lines.append("Tokenised data taken from the cache")
    loaded = getattr(run.step, "loaded", None)
    if loaded is not None:
        lines.append(loaded.in_words())
    if is_trained(run):
        lines.append(f"All {run.state.step} steps were done before; only the export is missing")
    elif run.state.step:
        lines.append(f"Resuming after step {run.state.step}")
    return lines


def _write_start(run: Run) -> None:
    prepared, folder = run.prepared, run.folder
    folder.make()  # one that an earlier version made could be read by all
    replace_text(folder.config, with_folder(dump_config(prepared.cfg)), private=True)
    if prepared.cfg.typed:
        folder.write_json(VARIABLES, noted_variables(prepared.cfg))
    folder.write_json("plan.json", prepared.plan.to_json())
    validation = prepared.validation.stats.to_json() if prepared.validation else None
    folder.write_json("data.json", {"train": prepared.train.stats.to_json(), "validation": validation})
    if prepared.train.layout is not None:
        folder.write_json(LAYOUT, prepared.train.layout)
    if run.base is not None and prepared.adapter is not None:
        model, extra = to_plain(prepared.cfg)["model"], prepared.cfg.model.extra
        changed = {key: model[key] for key in extra if HIDDEN not in str(model[key])}
        folder.write_json(BASE, {"sample": run.base, "changed": changed})
    if prepared.adapter is not None and not (folder.run / KEPT).exists():  # noted once: it is the run's from then on
        folder.write_json(KEPT, to_keep(prepared.adapter))
    run.trackers.start(folder.run, to_plain(prepared.cfg), prepared.plan.to_json())


def _finish(run: Run, outcome: Outcome, stop: StopRequest, tells_next: bool) -> Finished:
    folder, prepared, stop.writing = run.folder, run.prepared, outcome.status != "interrupted"
    summary = _summary(run, outcome)
    if _exports(run, outcome):
        with written_at_the_end(f"the {prepared.saved_kind}", folder.root, run.checkpoints):
            summary |= _export(run, outcome)  # while the last checkpoint is still being written
    elif before := exported_before(folder):
        summary["exported"] = before
    stays = summary.pop("stays", False)
    if run.checkpoints:
        run.checkpoints.wait()
    summary["wall_s"] = time.perf_counter() - run.started
    with written_at_the_end("the report", folder.run, run.checkpoints):
        folder.write_json("summary.json", summary)
        run.trackers.finish(summary)
        report = write_report(folder.run)
    run.progress.close()  # below the bar, as the last state of it
    if outcome.status == "interrupted":
        kept = "The state is saved" if run.checkpoints else "Nothing was saved (checkpoint.enabled: false)"
        run.progress.warn(f"Stopped by {outcome.signal} after step {run.state.step}. {kept}.")
        run.progress.info(cost_line(run, summary))
        if run.checkpoints and tells_next:
            run.progress.info(f"Continue with: {resume_command(run)}")
        return Finished(folder.root, summary, report, EXIT_INTERRUPTED)
    if outcome.status == "stopped early":
        run.progress.info(f"Stopped early after step {run.state.step}: {_since_the_best(run)}")
    if summary["skipped_steps"]:
        run.progress.info(
            f"{summary['skipped_steps']} of {run.state.step} steps were skipped: fp16 gradients overflowed until the "
            "loss scale was small enough"
        )
    if prepared.cfg.checkpoint.enabled:
        done, where = ("Left", "in") if stays else ("Saved", "to")
        run.progress.info(f"{done} the {prepared.saved_kind} {where} {folder.root}")
        if prepared.adapter is not None and prepared.adapter.dora:
            drawn = "transformers' own from_pretrained draws a DoRA adapter's lengths anew"
            run.progress.info(f"{drawn}: load it with PEFT or automodel, or merge it (automodel export --merge)")
    else:
        run.progress.info(f"No {prepared.saved_kind} was saved: checkpoint.enabled is false")
    if run.checkpoints and (stop.requested or stays):
        # Soon there may be no machine any more; or the last weights are nowhere else.
        run.checkpoints.bring_to_disk()
    if stop.requested:
        run.progress.info(f"{stop.requested} came at the end: nothing was left to train, and everything is written")
    if best := best_line(summary):
        run.progress.info(best)
    run.progress.info(cost_line(run, summary))
    run.progress.info(f"Report: {report}")
    if prepared.cfg.checkpoint.enabled and tells_next:
        for line in next_lines(run, outcome.status == "stopped early"):
            run.progress.info(line)
    return Finished(folder.root, summary, report, EXIT_OK)


def _exports(run: Run, outcome: Outcome) -> bool:
    return run.prepared.cfg.checkpoint.enabled and outcome.status != "interrupted"


def _export(run: Run, outcome: Outcome) -> dict[str, Any]:
    """Writes the HF folder: the best weights where there is a validation set, the last ones otherwise."""
    best, checkpoints = run.state.best, run.checkpoints
    chosen: dict[str, Any] = {"exported_step": run.state.step}
    if run.prepared.cfg.checkpoint.keep_best and best.step is not None and best.step != run.state.step and checkpoints:
        checkpoint, problem, before = whole_checkpoint(run.prepared, checkpoints, run.folder, best.step)
        if checkpoint is not None:
            read: Any = checkpoint.parts if run.prepared.layout.fsdp else checkpoint.tensors
            run.step.load_weights(read("model"), str(checkpoint.folder))
            run.progress.info(f"Exporting step {best.step}, the best by {best.metric} ({best.value:.4f})")
            chosen = {"exported_step": best.step}
            assert run.evaluator is not None
            alone = not run.prepared.layout.fsdp  # then the other ranks have gone
            metrics = run.evaluator() if alone else evaluate_for_all(run.evaluator, run.prepared.ranks)
            chosen |= {"validation": metrics.values, "confusion_matrix": metrics.confusion_matrix}
        else:
            what = f"The checkpoint of step {best.step}, the best by {best.metric}, {problem}"
            if before:
                kept = f"its {run.prepared.saved_kind}, which was exported before, stays in {run.folder.root}"
                last = f"automodel checkpoint convert {shlex.quote(str(run.folder.root))} --out FOLDER"
                run.progress.warn(f"{what}; {kept}. The last weights: {last}")
                return before | {"stays": True}
            run.progress.warn(f"{what}; the last weights are exported.")
    run.step.finish()
    tokenizer = run.prepared.tokenizer
    if run.prepared.train.chat_template:
        tokenizer.chat_template = run.prepared.train.chat_template
    before = model_files(run.folder.root)
    weights = None
    if run.prepared.layout.fsdp:
        parts = run.step.weights()
        from automodel.distributed.shards import whole_by_whole  # as in build.py: DTensor is not for everyone

        wholes = whole_by_whole(parts, run.prepared.ranks.first)
        weights = {name: part.nbytes for name, part in parts.items()}, wholes
        if not run.prepared.ranks.first:
            collections.deque(wholes, maxlen=0)  # the first rank writes what everyone helps to put together
            return chosen
    save_hf_folder(run.model, tokenizer, run.folder.root, weights)
    after = model_files(run.folder.root)
    run.folder.write_json(EXPORTED, sorted(name for name in after if after[name] != before.get(name)))
    return chosen


def _summary(run: Run, outcome: Outcome) -> dict[str, Any]:
    import torch
    import transformers

    from automodel import __version__

    state, plan, prepared, cfg = run.state, run.prepared.plan, run.prepared, run.prepared.cfg
    mixed = prepared.train.mixture
    best, loaded = state.best, getattr(run.step, "loaded", None)
    return {
        "task": prepared.task.name,
        "problem_type": prepared.train.problem_type,
        "status": outcome.status,
        "steps": state.step,
        "epochs": state.epoch,
        "train_s": state.train_seconds,
        "train_loss": state.mean_loss(),
        "skipped_steps": run.step.skipped_steps(),
        "best": {"step": best.step, "metric": best.metric, "value": best.value} if best.step is not None else None,
        "validation": outcome.validation.values if outcome.validation else None,
        "confusion_matrix": outcome.validation.confusion_matrix if outcome.validation else None,
        "label_names": prepared.train.label_names,
        "tokens_per_s": state.tokens / max(state.train_seconds, 1e-9),
        "samples_per_s": state.samples / max(state.train_seconds, 1e-9),
        "seconds_per_epoch": state.train_seconds / max(1, state.step) * plan.steps_per_epoch,
        "peak_memory_gib": max(outcome.memory.peak_gib, run.earlier.peak_memory_gib),
        "checkpoint_wait_s": run.checkpoints.waited_s if run.checkpoints else 0.0,
        "loaded": asdict(loaded) if loaded else None,
        "parameters": plan.parameters,
        "device": prepared.hardware.name,
        "model": typed_at(cfg, "model.pretrained_model_name_or_path", cfg.model.pretrained_model_name_or_path),
        "dataset": as_written(", ".join(mixed.names)) if mixed else typed_at(cfg, "dataset.path", cfg.dataset.path),
        "versions": {
            "automodel": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
