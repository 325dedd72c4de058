"""The training loop: a list of verbs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from automodel.engine.build import Run, now, save
from automodel.engine.diverged import diverged
from automodel.engine.evaluate import evaluate_for_all
from automodel.engine.log_lines import LogLines
from automodel.engine.observe import Observer
from automodel.engine.signals import StopRequest
from automodel.engine.step import StepResult
from automodel.metrics.compute import EvalMetrics
from automodel.metrics.throughput import MemoryMeter, Throughput

MOST_SKIPPED = 64  # a scale of 2^16 has become 2^-48 by then; healthy runs skip a handful


@dataclass
class Outcome:
    """How a loop ended."""

    status: str
    """`finished`, `stopped early` or `interrupted`."""
    memory: MemoryMeter
    validation: EvalMetrics | None
    signal: str | None = None


def train(run: Run, observer: Observer, stop: StopRequest) -> Outcome:
    """Runs to the planned number of steps, to an early stop, or to a signal."""
    plan, state, patience = run.prepared.plan, run.state, run.prepared.cfg.early_stopping
    throughput, memory = Throughput(), MemoryMeter(plan.device)
    seconds_before = state.train_seconds
    outcome = Outcome("finished", memory, None)
    observer.loop_begins(plan)
    with LogLines(run, throughput, memory) as lines:
        for batch in run.loader:
            observer.step_begins()
            result = run.step(state.step, batch)
            state.add(result, batch.epochs_done)
            last = state.step >= plan.total_steps
            validates = run.evaluator and (last or state.step % plan.val_every_steps == 0)
            saves = run.checkpoints and (last or state.step % plan.ckpt_every_steps == 0)
            observer.step_ends(result, pauses=bool(last or validates or saves))
            throughput.update(result.samples, result.tokens)
            run.progress.step(state.step)
            if last or state.step % run.prepared.cfg.step_scheduler.log_every_steps == 0:
                lines.due(result)
            requested, improved = stop.agreed(run.prepared.ranks), False
            lines.write(wait=bool(last or validates or saves or requested))
            if validates or saves or requested:
                _check_finite(run, result)
            throughput.pause()
            state.train_seconds = seconds_before + throughput.train_s
            if validates:
                outcome.validation, improved = _validate(run)
                if patience and state.best.stale >= patience.patience and not last:
                    outcome.status, last = "stopped early", True
                    lines.end(result)
            if requested and not last:
                outcome.status, outcome.signal, last = "interrupted", requested, True
            if saves or (run.checkpoints and (last or improved)):
                save(run, last, at_once=not last or bool(requested))
            throughput.resume()
            if last:
                break
    observer.loop_ends(outcome.validation)
    return outcome


def is_trained(run: Run) -> bool:
    """Whether a resumed run has nothing left to learn: it was ended between its last step and its export."""
    patience = run.prepared.cfg.early_stopping
    stopped_early = patience is not None and run.state.best.stale >= patience.patience
    return run.state.step >= run.prepared.plan.total_steps or stopped_early


def only_evaluate(run: Run) -> Outcome:
    """The outcome of a run whose training is over: its numbers, without a step."""
    early = run.state.step < run.prepared.plan.total_steps
    memory = MemoryMeter(run.prepared.plan.device)
    memory.read()
    validation = evaluate_for_all(run.evaluator, run.prepared.ranks) if run.evaluator else None
    return Outcome("stopped early" if early else "finished", memory, validation)


def _check_finite(run: Run, result: StepResult) -> None:
    """Broken weights are neither evaluated nor saved: a checkpoint of them would push out the last good one."""
    loss, norm = run.state.window.total(), float(result.grad_norm)
    if not math.isfinite(loss):
        raise diverged(run, "loss", loss, run.state.step, run.state.window)
    if math.isfinite(norm):
        return
    if run.prepared.plan.precision != "fp16":
        raise diverged(run, "gradient norm", norm, run.state.step)
    # In fp16 an overflowing gradient is everyday business: the step is skipped and the loss scale halved. But a scale
    # that never becomes small enough would end as a run that has learned nothing.
    if run.step.skipped_steps() > max(MOST_SKIPPED, run.state.step // 2):
        raise diverged(run, "fp16 gradient norm, for more than half of all steps,", norm, run.state.step)


def _measured(run: Run) -> EvalMetrics:
    """An evaluation needs memory beside that of captured steps: where it finds none, they make room and it is tried
    again, and where there still is none, what was learned is saved before the run ends. Ranks would wait for each
    other."""
    assert run.evaluator is not None
    try:
        return evaluate_for_all(run.evaluator, run.prepared.ranks)
    except torch.OutOfMemoryError:
        if run.prepared.ranks.together:
            raise
    run.step.free_unused()  # only here is the error gone, and with it what it held
    try:
        return evaluate_for_all(run.evaluator, run.prepared.ranks)
    except torch.OutOfMemoryError:
        if run.checkpoints:
            save(run)
        raise


def _validate(run: Run) -> tuple[EvalMetrics, bool]:
    metrics = _measured(run)
    state = run.state
    state.last_validation = metrics.values
    improved = False
    value = metrics.values.get(state.best.metric)
    if value is not None:
        improved = state.best.update(state.step, value) and run.prepared.cfg.checkpoint.keep_best
    run.progress.validation(state.step, metrics.values)
    run.trackers.log(state.step, {**metrics.values, "epoch": state.epoch, "time": now() - run.started}, "validation")
    if not math.isfinite(metrics.values["loss"]):
        raise diverged(run, "validation loss", metrics.values["loss"], state.step)
    return metrics, improved
