"""The one place that assembles a run, in one visible order. Nobody reads the config after this.

seed → weights → packed attention → gradient checkpointing → loss → optimizer → loaders → evaluator → checkpoints
→ trackers → resume.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from automodel.checkpoint import randomness
from automodel.checkpoint.store import Checkpoint, CheckpointStore
from automodel.config.errors import UserError
from automodel.config.gate import resolve_target
from automodel.config.load import dump_config
from automodel.data.collate import PackedCollator, PaddedCollator
from automodel.data.loader import EvalLoader, StepLoader
from automodel.data.prepare import PreparedData
from automodel.engine.evaluate import Evaluator
from automodel.engine.folder import RunFolder
from automodel.engine.prepare import Prepared
from automodel.engine.state import Best, TrainState
from automodel.engine.step import TrainStep
from automodel.metrics.progress import Progress
from automodel.metrics.trackers import Trackers, build_trackers
from automodel.models.forward import make_forward
from automodel.models.load import align_pad_token, load_model
from automodel.optim.build import build_optimizer, load_state_tensors, state_tensors
from automodel.optim.schedule import Schedule


@dataclass
class Run:
    """An assembled run; the loop does the rest."""

    prepared: Prepared
    folder: RunFolder
    model: Any
    step: TrainStep
    loader: StepLoader
    evaluator: Evaluator | None
    checkpoints: CheckpointStore | None
    trackers: Trackers
    progress: Progress
    state: TrainState
    started: float


def build(prepared: Prepared, folder: RunFolder, progress_of: Any, *, resume: bool, started: float) -> Run:
    """Loads the weights and puts the parts together. `progress_of(total, start)` makes the progress display."""
    cfg, plan = prepared.cfg, prepared.plan
    randomness.seed_everything(cfg.seed)
    if plan.device == "cuda" and (plan.precision == "tf32" or cfg.training_optimizations.tf32):
        torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if plan.precision == "bf16-pure" else torch.float32
    model = load_model(cfg.model, prepared.hf_config, prepared.task, dtype=dtype, device=plan.device)
    align_pad_token(model, prepared.tokenizer)
    model.train()
    if cfg.training_optimizations.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    forward = make_forward(model, prepared.task, plan.path)
    optimizer_class = None
    if cfg.optimizer.target:
        optimizer_class = resolve_target(cfg.optimizer.target, "optimizer", cfg.optimizer.extra, prepared.trust)
    optimizer = build_optimizer(model, cfg.optimizer, optimizer_class)
    step = TrainStep(
        model,
        forward,
        prepared.loss,
        optimizer,
        Schedule(cfg.lr_scheduler, plan.total_steps),
        peak_lr=cfg.optimizer.lr,
        max_norm=cfg.training_optimizations.gradient_clipping,
        precision=plan.precision,
        device=plan.device,
    )
    loader = make_step_loader(prepared)
    evaluator = None
    if prepared.validation is not None:
        evaluator = make_evaluator(prepared, prepared.validation, model, forward)
    checkpoints = CheckpointStore(folder.steps, cfg.checkpoint.keep_last) if cfg.checkpoint.enabled else None
    patience_delta = cfg.early_stopping.min_delta if cfg.early_stopping else 0.0
    state = TrainState(Best(prepared.best_metric, prepared.best_mode, patience_delta))
    notes: list[str] = []
    if resume:
        state, notes = _restore(folder, checkpoints, model, step, loader)
    progress = progress_of(plan.total_steps, state.step)
    for note in notes:
        progress.warn(note)
    trackers = build_trackers(
        wandb=cfg.wandb,
        mlflow=cfg.mlflow,
        tensorboard=cfg.tensorboard,
        run_dir=folder.run,
        resume_step=state.step if resume else None,
        info=progress.info,
        warn=progress.warn,
    )
    return Run(prepared, folder, model, step, loader, evaluator, checkpoints, trackers, progress, state, started)


def make_collator(prepared: Prepared, data: PreparedData, batch_size: int) -> PackedCollator | PaddedCollator:
    plan = prepared.plan
    if plan.path == "packed":
        return PackedCollator(
            data.store,
            task=prepared.task,
            pool=prepared.packing.pooling or "first",
            bucket_tokens=plan.bucket_tokens,
            max_seqlen=plan.max_length,
            micro_batch_size=batch_size,
        )
    return PaddedCollator(
        data.store,
        task=prepared.task,
        pad_token_id=prepared.tokenizer.pad_token_id or 0,
        padding_side="right",
    )


def make_step_loader(prepared: Prepared) -> StepLoader:
    cfg, plan = prepared.cfg.dataloader, prepared.plan
    return StepLoader(
        make_collator(prepared, prepared.train, plan.micro_batch_size),
        lengths=prepared.train.store.lengths,
        micro_batch_size=plan.micro_batch_size,
        grad_acc_steps=plan.grad_acc_steps,
        seed=prepared.cfg.seed,
        shuffle=cfg.shuffle is not False,
        drop_last=cfg.drop_last,
        group_by_length=plan.path == "padded" and cfg.shuffle is not False and cfg.group_by_length is not False,
        num_workers=plan.num_workers,
        pin_memory=plan.pin_memory,
        persistent_workers=cfg.persistent_workers,
        prefetch_factor=cfg.prefetch_factor,
    )


def make_evaluator(prepared: Prepared, data: PreparedData, model: Any, forward: Any) -> Evaluator:
    cfg, plan = prepared.cfg.validation_dataloader, prepared.plan
    batch_size = cfg.batch_size or max(16, plan.micro_batch_size)
    loader = EvalLoader(
        make_collator(prepared, data, batch_size),
        lengths=data.store.lengths,
        batch_size=batch_size,
        num_workers=cfg.num_workers or 0,
        pin_memory=plan.pin_memory,
    )
    return Evaluator(
        model,
        forward,
        prepared.loss,
        loader,
        prepared.task,
        data.problem_type,
        data.label_names,
        plan.precision,
        plan.device,
    )


def model_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Every tensor that makes up the model, tied ones once."""
    named = dict(model.named_parameters())
    kept = model.state_dict().keys()
    named.update({n: b for n, b in model.named_buffers() if n in kept})
    return named


def save(run: Run) -> Checkpoint:
    """Writes a resumable checkpoint of the run as it stands now."""
    assert run.checkpoints is not None
    optimizer_tensors, optimizer_values = state_tensors(run.step.optimizer, run.model)
    rng_tensors, rng_values = randomness.capture()
    best = run.state.best.step
    return run.checkpoints.save(
        run.state.step,
        {"model": model_tensors(run.model), "optimizer": optimizer_tensors, "rng": rng_tensors},
        {
            "train": run.state.to_json(),
            "loader": run.loader.state_dict(),
            "optimizer": optimizer_values,
            "rng": rng_values,
            "scaler": run.step.scaler.state_dict(),
            "config": dump_config(run.prepared.cfg),
        },
        protect=[best] if best is not None and run.prepared.cfg.checkpoint.keep_best else [],
    )


def load_weights(model: Any, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint's weights into the model, exactly."""
    tensors = checkpoint.tensors("model")
    own = model_tensors(model)
    wrong = [n for n in own if n not in tensors or tensors[n].shape != own[n].shape] + [
        n for n in tensors if n not in own
    ]
    if wrong:
        raise UserError(
            f"{checkpoint.folder} does not fit this model: '{wrong[0]}' and {len(wrong) - 1} more differ. "
            "Resume with the config the run was started with (run/config.yaml)."
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _restore(
    folder: RunFolder, checkpoints: CheckpointStore | None, model: Any, step: TrainStep, loader: StepLoader
) -> tuple[TrainState, list[str]]:
    if checkpoints is None:
        raise UserError("--resume needs checkpoints, but checkpoint.enabled is false.")
    checkpoint, notes = checkpoints.latest()
    if checkpoint is None:
        raise UserError(
            f"--resume: {folder.steps} has no complete checkpoint yet, so there is nothing to continue. "
            "Start again with --overwrite." + "".join(f"\n  {n}" for n in notes)
        )
    state = checkpoint.state()
    load_weights(model, checkpoint)
    load_state_tensors(step.optimizer, model, checkpoint.tensors("optimizer"), state["optimizer"])
    step.scaler.load_state_dict(state["scaler"])
    loader.load_state_dict(state["loader"])
    randomness.restore(checkpoint.tensors("rng"), state["rng"])
    return TrainState.from_json(state["train"]), [*notes]


def now() -> float:
    return time.perf_counter()
