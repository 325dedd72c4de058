"""The one place that assembles a run, in one visible order. Nobody reads the config after this.

seed → weights → packed attention → gradient checkpointing → loss → optimizer → loaders → evaluator → checkpoints
→ trackers → resume.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from automodel.checkpoint import randomness
from automodel.checkpoint.store import CheckpointStore
from automodel.config.errors import UserError
from automodel.config.gate import trust_arguments
from automodel.config.load import dump_config
from automodel.data.loader import EvalLoader, StepLoader
from automodel.data.prepare import PreparedData
from automodel.engine.best_model import exported_before, lost_best
from automodel.engine.captured import CapturedStep
from automodel.engine.evaluate import Evaluator, Share
from automodel.engine.folder import RunFolder
from automodel.engine.observe import Observer
from automodel.engine.prepare import Prepared
from automodel.engine.room import check_room
from automodel.engine.same_run import best_so_far, changes_of_course, check_same_base, given_since
from automodel.engine.state import Best, TrainState, check_same_step
from automodel.engine.step import TrainStep
from automodel.engine.steps import make_collator, make_fitting_step, make_step_loader
from automodel.kernels import ahead
from automodel.metrics.jsonl import EarlierParts, earlier_parts, missing_history
from automodel.metrics.progress import Progress
from automodel.metrics.trackers import Trackers, build_trackers
from automodel.models.same_base import sample_of


@dataclass
class Run:
    """An assembled run; the loop does the rest."""

    prepared: Prepared
    folder: RunFolder
    model: Any
    step: TrainStep | CapturedStep
    loader: StepLoader
    evaluator: Evaluator | None
    checkpoints: CheckpointStore | None
    trackers: Trackers
    progress: Progress
    state: TrainState
    started: float
    """When the run began, on this process's clock: earlier, by what it had taken before it was resumed."""
    base: str | None
    """What tells the weights that `model:` names from others (`sample_of`)."""
    earlier: EarlierParts
    """What the run cost before it was resumed."""

    @cached_property
    def config_text(self) -> str:
        """Made once: writing YAML takes longer than a step."""
        return dump_config(self.prepared.cfg)


def build(
    prepared: Prepared, folder: RunFolder, progress_of: Any, *, resume: bool, started: float, observer: Observer
) -> Run:
    """Loads the weights and puts the parts together. `progress_of(total, start)` makes the progress display."""
    planned = prepared.plan
    loader = make_step_loader(prepared)
    if not resume:
        loader.start()  # its workers make the first batches while the weights are loaded and tried out
    prepared, model, step = make_fitting_step(prepared, observer)
    cfg, plan, ranks = prepared.cfg, prepared.plan, prepared.ranks
    base = sample_of(cfg.model)
    if not prepared.layout.fsdp:  # whose ranks hold different parts
        masters = [step.optimizer.flat.weight] if isinstance(step, CapturedStep) else []
        ranks.same_start([*model.parameters(), *model.buffers(), *masters])
    randomness.seed_rank(cfg.seed, ranks, prepared.layout.tp)
    if plan != planned:
        loader.stop()
        loader = make_step_loader(prepared)
    evaluator = None
    if prepared.validation is not None:
        evaluator = make_evaluator(prepared, prepared.validation, model, step)
    checkpoints = make_store(prepared, folder)
    patience_delta = cfg.early_stopping.min_delta if cfg.early_stopping else 0.0
    state = TrainState(Best(prepared.best_metric, prepared.best_mode, patience_delta))
    notes: list[str] = []
    earlier = EarlierParts()
    if resume:
        state, notes = _restore(folder, checkpoints, step, loader, prepared, base, state.best)
        history = folder.run / "metrics.jsonl"
        earlier = earlier_parts(history, folder.read_json("summary.json"))
        lost = missing_history(history, state.step, cfg.step_scheduler.log_every_steps)
        notes += [lost] if lost else []
        started -= earlier.seconds  # the run's time, not the process's
    progress = progress_of(plan.total_steps, state.step)
    if checkpoints is not None:
        checkpoints.warn = progress.warn
        if isinstance(step, TrainStep):  # what was tried of a captured one is in torch's own count
            checkpoints.leave_room(step.most_bytes)
        notes += filter(None, [ranks.told(lambda: check_room(cfg, folder.steps, step, plan.optimizer))])
    for note in notes:
        progress.warn(note)
    for line in plan.decisions:
        if line not in planned.decisions:  # something had to be tried to be known
            progress.info(f"{line.name}: {line.value} ({line.reason})")
    step.warn = progress.warn
    if remark := ahead.take_remark():
        progress.info(remark)
    trackers = Trackers([])
    if ranks.first:
        trackers = build_trackers(
            wandb=cfg.wandb,
            mlflow=cfg.mlflow,
            tensorboard=cfg.tensorboard,
            run_dir=folder.run,
            resume_step=state.step if resume else None,
            info=progress.info,
            warn=progress.warn,
        )
    return Run(
        prepared,
        folder,
        model,
        step,
        loader,
        evaluator,
        checkpoints,
        trackers,
        progress,
        state,
        started,
        base,
        earlier,
    )


def make_evaluator(prepared: Prepared, data: PreparedData, model: Any, step: TrainStep | CapturedStep) -> Evaluator:
    cfg, plan = prepared.cfg.validation_dataloader, prepared.plan
    batch_size = cfg.batch_size or max(16, plan.micro_batch_size)
    loader = EvalLoader(
        make_collator(prepared, data, batch_size),
        lengths=data.store.lengths,
        batch_size=batch_size,
        most_tokens=plan.packed_sequence_size or None,
        num_workers=min(cfg.num_workers or 0, prepared.hardware.cores),
        pin_memory=plan.pin_memory,
    )
    kind = prepared.task.metrics(data.problem_type)
    return Evaluator(
        model,
        step.forward,
        prepared.loss,
        loader,
        kind,
        data.label_names,
        step.compute,
        plan.device,
        together=prepared.layout.fsdp,
        share=_share_of(prepared, step) if prepared.ranks.size > 1 and kind == "tokens" else None,
    )


def _share_of(prepared: Prepared, step: TrainStep | CapturedStep) -> Share:
    layout, rank = prepared.layout, prepared.ranks.rank
    place = layout.cp_rank(rank), layout.tp_rank(rank)
    cut = getattr(getattr(step, "whole", None), "cut", None)
    return Share(layout.data_rank(rank), layout.data_ranks, place == (0, 0), place[1] == 0, cut)


def make_store(prepared: Prepared, folder: RunFolder) -> CheckpointStore | None:
    cfg = prepared.cfg.checkpoint
    if not cfg.enabled:
        return None
    return CheckpointStore(
        folder.steps, cfg.keep_last, ranks=prepared.ranks, background=cfg.async_save, on_error=cfg.on_error
    )


def save(run: Run, last: bool = False, at_once: bool = True) -> None:
    """A resumable checkpoint of the run as it stands now. It is written while training goes on; `last`: it does not.
    Not `at_once`: a model is exported, for which the disk is wanted more."""
    assert run.checkpoints is not None
    rng_tensors, rng_values = randomness.capture_of_all(run.prepared.ranks)
    if not run.prepared.ranks.first and not run.prepared.layout.fsdp:  # otherwise everyone writes what it holds
        return
    step_tensors, step_values = run.step.state()
    best = run.state.best.step
    run.checkpoints.begin(
        run.state.step,
        {"model": run.step.weights(), "optimizer": step_tensors, "rng": rng_tensors},
        {
            "train": run.state.to_json(),
            "loader": run.loader.state_dict(),
            "step": step_values,
            "step_kind": _kind_of(run.step),
            "device": run.prepared.plan.device,
            "precision": run.prepared.plan.precision,
            "products": run.prepared.plan.products,
            "ranks": run.prepared.ranks.size,
            "rng": rng_values,
            "base": run.base,
            "data": run.prepared.facts_of_data(),
            "held_out": _held_out(run.prepared),
            "config": run.config_text,
        },
        protect=[best] if best is not None and run.prepared.cfg.checkpoint.keep_best else [],
        last=last,
        at_once=at_once,
    )


def _restore(
    folder: RunFolder,
    checkpoints: CheckpointStore | None,
    step: TrainStep | CapturedStep,
    loader: StepLoader,
    prepared: Prepared,
    base: str | None,
    best: Best,
) -> tuple[TrainState, list[str]]:
    """The run as its last checkpoint has it. `best`: the one that the config asks for."""
    if checkpoints is None:
        raise UserError("--resume needs checkpoints, but checkpoint.enabled is false.")
    checkpoint, notes = checkpoints.latest()
    if checkpoint is None:
        then = "Start again with --overwrite."
        if exported_before(folder):
            key = "model.pretrained_model_name_or_path" if prepared.adapter is None else "peft.pretrained_adapter"
            then = (
                f"What it has learned is whole in {folder.root}: begin a new run with that, in a folder of its own "
                f"({key}={folder.root} checkpoint.checkpoint_dir=./another), or start again with --overwrite."
            )
        raise UserError(
            f"--resume: {folder.steps} has no complete checkpoint{'' if notes else ' yet'}, so there is nothing to "
            f"continue. {then}" + "".join(f"\n  {n}" for n in notes)
        )
    state = checkpoint.state()
    given = [*trust_arguments(prepared.trust), *given_since(prepared.cfg, folder)]
    described = state["loader"]["describes"], loader.describe()
    check_same_step(*described, state.get("ranks", 1), prepared.ranks.size, str(folder.config), given)
    check_same_base(state.get("base"), base, prepared.cfg, folder)
    read: Any = checkpoint.parts if prepared.layout.fsdp else checkpoint.tensors
    step.load_weights(read("model"), str(checkpoint.folder))
    step.load_state(read("optimizer"), state["step"])
    loader.load_state_dict(state["loader"])
    rng, alike = checkpoint.tensors("rng"), prepared.layout.tp
    randomness.restore_own(rng, state["rng"], prepared.cfg.seed, prepared.ranks, alike)
    notes += [*_changes_since(state, _kind_of(step), prepared), *changes_of_course(prepared.cfg, folder)]
    prepared.ranks.barrier()  # nothing is written before everyone has read
    found, held_out = TrainState.from_json(state["train"]), state.get("held_out")
    measured_on = prepared.validation
    same = None if held_out is None else measured_on is not None and measured_on.store.is_that_of(held_out)
    found.best, more = best_so_far(found.best, best, prepared.cfg, folder, same)
    if prepared.cfg.checkpoint.keep_best:
        more += lost_best(folder, found.best, found.step)
    return found, [*notes, *more]


def _held_out(prepared: Prepared) -> str | None:
    """What tells the data that is measured on from others."""
    return None if prepared.validation is None else prepared.validation.store.content


def _kind_of(step: TrainStep | CapturedStep) -> str:
    return (CapturedStep if isinstance(step, CapturedStep) else TrainStep).__name__


def _changes_since(state: dict[str, Any], kind: str, prepared: Prepared) -> list[str]:
    """What a person should know where a run goes on in another way than it began."""
    notes = []
    plan = prepared.plan
    ranks = state.get("ranks", 1)
    if ranks != prepared.ranks.size:
        notes.append(
            f"The checkpoint comes from {ranks} rank{'s' if ranks > 1 else ''}, and {prepared.ranks.size} "
            f"{'go' if prepared.ranks.size > 1 else 'goes'} on with it: same steps, same documents; dropout, where "
            "there is any, is drawn in another way."
        )
    device = state.get("device", plan.device)  # checkpoints of the first version do not say
    if state["step_kind"] != kind or device != plan.device:
        before = "captured" if state["step_kind"] == CapturedStep.__name__ else "eager"
        after = "captured" if kind == CapturedStep.__name__ else "eager"
        notes.append(
            f"The checkpoint comes from {before} steps on {device}, and {after} steps on {plan.device} go on with it. "
            "Weights, optimizer and data continue; dropout is drawn in another way, so the losses will not be those of "
            "an uninterrupted run."
        )
    if state.get("precision", plan.precision) != plan.precision:
        notes.append(f"The run was in {state['precision']} so far and continues in {plan.precision}.")
    return notes


def now() -> float:
    return time.perf_counter()
