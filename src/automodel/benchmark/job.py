"""The common ground of a comparison, made once and used by every side.

Weights: the model is loaded (or drawn at random) once and written as a plain Hugging Face folder in fp32; every side
starts from that folder, so even a new classification head is the same. Tokens: the data is tokenised once into the
token store; every side reads it from there, so tokenising is part of nobody's time. Settings: one `job.json` holds
the numbers that the plan decided (steps, batch, accumulation, intervals) and those of the config (learning rate,
schedule, clipping, …).

What only one side could do is switched off everywhere and said in `notes`: early stopping, trackers.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel.config.dump import dump_config, with_hidden_secrets
from automodel.config.errors import NotYetError, UserError
from automodel.config.gate import canonical
from automodel.data.order import StepOrder
from automodel.engine.prepare import Prepared, prepare_run
from automodel.engine.steps import make_step_loader
from automodel.optim.kinds import KINDS
from automodel.plan.asked import asked_precision
from automodel.plan.config import RunConfig
from automodel.tasks.registry import TASKS

COMPARED_TASKS = tuple(task for task in TASKS if not task.head.encoder_decoder)
SMALLEST_EVAL_BATCH = 16  # the engine's own default
OTHER_HEADS = ("qa_dropout",)  # of heads that none of these tasks has
ORDER = ("micro_batch_size", "grad_acc_steps", "seed", "shuffle", "drop_last", "group_by_length", "sort_within_step")


@dataclass(frozen=True)
class Job:
    """A comparison that is ready to run."""

    folder: Path
    settings: dict[str, Any]
    """What job.json holds."""
    prepared: Prepared
    notes: tuple[str, ...]
    trust: tuple[str, ...]

    @property
    def device(self) -> str:
        return self.prepared.plan.device


def make_job(cfg: RunConfig, folder: Path, *, steps: int | None, warmup: int | None, trust: Sequence[str] = ()) -> Job:
    """Writes weights, tokens and settings for every side into `folder`. `steps` and `warmup` override the config."""
    notes: list[str] = []
    cfg = _without_extras(cfg, steps, notes)
    _check_comparable(cfg)
    first = prepare_run(dataclasses.replace(cfg, peft=None), trust)  # random weights have no place to find again yet
    if first.task not in COMPARED_TASKS:
        raise NotYetError(f"task: {first.task} cannot be benchmarked yet; {', '.join(map(str, COMPARED_TASKS))} can.")
    folder.mkdir(parents=True, exist_ok=True)
    weights = _write_weights(first, folder / "model")
    cfg = dataclasses.replace(cfg, model=_model_from(cfg, weights))
    prepared = prepare_run(cfg, trust)  # the tokens of exactly the config that our side gets
    usual = cfg.benchmark.warmup_steps if cfg.benchmark else 10
    settings = _settings(prepared, weights, warmup_steps(warmup, usual, prepared.plan.total_steps))
    if prepared.adapter is not None:
        settings["adapter"] = str(_write_adapter(prepared, folder / "adapter"))
    (folder / "run.yaml").write_text(dump_config(cfg), encoding="utf-8")
    (folder / "job.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return Job(folder, settings, prepared, tuple(notes), tuple(trust))


def _without_extras(cfg: RunConfig, steps: int | None, notes: list[str]) -> RunConfig:
    changes: dict[str, Any] = {}
    if cfg.early_stopping is not None:
        changes["early_stopping"] = None
        notes.append("early stopping is off on every side: all run the same number of steps")
    trackers = [name for name in ("wandb", "mlflow", "tensorboard") if getattr(cfg, name) is not None]
    if trackers:
        changes |= dict.fromkeys(trackers)
        notes.append(f"{', '.join(trackers)} left out on every side")
    if steps is not None:
        changes["step_scheduler"] = dataclasses.replace(cfg.step_scheduler, max_steps=steps, num_epochs=None)
    return dataclasses.replace(cfg, **changes)


def _check_comparable(cfg: RunConfig) -> None:
    """Refuses what Trainer cannot be told to do as well: a comparison of two different things is none."""
    for key in with_hidden_secrets(cfg):
        raise UserError(
            f"{key}: this looks like a secret, and every side reads the config from a file, which must not hold it. "
            "Put it into a variable of the environment and write `${NAME}`."
        )
    if cfg.peft is not None and importlib.util.find_spec("peft") is None:
        raise UserError(
            "peft: the other side is Trainer with PEFT, which is not installed: pip install peft accelerate."
        )
    if cfg.peft is not None and cfg.peft.loraplus_lr_ratio:
        raise NotYetError("peft.loraplus_lr_ratio: Trainer has no such setting. Remove it to compare.")
    if cfg.quantization is not None:
        raise NotYetError(
            "quantization: packed weights are not compared with Trainer yet. Remove the section to compare."
        )
    if cfg.dataset.mixture is not None:
        raise NotYetError("dataset.mixture: Trainer mixes no datasets. Give one path to compare.")
    if cfg.packed_sequence.packed_sequence_size:
        raise NotYetError(
            "packed_sequence.packed_sequence_size: Trainer counts examples, not tokens. Remove it to compare."
        )
    for key in ("class_weights", "z_loss"):
        if getattr(cfg.loss_fn, key):
            raise NotYetError(f"loss_fn.{key}: Trainer has no such setting, so there is nothing to compare with.")
    if optimizer_name(cfg) is None:
        used = cfg.optimizer.target or cfg.optimizer.name
        raise NotYetError(f"optimizer: {used} is not compared with Trainer yet. Use torch.optim.AdamW or SGD.")
    unknown = set(cfg.optimizer.extra) - {"fused", "foreach"}
    if unknown:
        raise NotYetError(f"optimizer.{min(unknown)}: Trainer has no such setting. Remove it to compare.")


def optimizer_name(cfg: RunConfig) -> str | None:
    """`adamw` or `sgd`; None for any other class."""
    if cfg.optimizer.target is None:
        kind = KINDS[cfg.optimizer.name]
        same = kind.bits == 32 and kind.algorithm in ("adamw", "sgd")  # paging changes no number
        return kind.algorithm if same else None
    return {"torch.optim.AdamW": "adamw", "torch.optim.SGD": "sgd"}.get(canonical(cfg.optimizer.target))


def _write_weights(prepared: Prepared, folder: Path) -> Path:
    import torch

    from automodel.models.load import load_model
    from automodel.models.save import save_hf_folder

    model = load_model(prepared.cfg.model, prepared.hf_config, prepared.task.head, dtype=torch.float32, device="cpu")
    folder.mkdir(parents=True, exist_ok=True)
    save_hf_folder(model, prepared.tokenizer, folder)
    return folder


def _write_adapter(prepared: Prepared, folder: Path) -> Path:
    """The adapter as our side draws it: both begin with the same numbers."""
    import torch

    from automodel.adapters.attach import attach
    from automodel.adapters.peft_folder import write_folder
    from automodel.models.load import load_model

    assert prepared.adapter is not None
    cfg = prepared.cfg
    model = load_model(
        cfg.model, prepared.hf_config, prepared.task.head, dtype=torch.float32, device="cpu", seed=cfg.seed
    )
    attach(model, prepared.adapter, seed=cfg.seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_folder(model, prepared.adapter, folder)
    return folder


def _model_from(cfg: RunConfig, weights: Path) -> Any:
    """The `model:` section that loads the written folder; attributes under `model:` are in its config.json by now."""
    target = cfg.model.target
    if target is not None and target.endswith(".from_config"):
        target = target.removesuffix(".from_config") + ".from_pretrained"
    return dataclasses.replace(
        cfg.model,
        pretrained_model_name_or_path=str(weights),
        tokenizer=None,
        target=target,
        revision=None,
        cache_dir=None,
        extra={},
    )


def warmup_steps(asked: int | None, usual: int, steps: int) -> int:
    """Steps left out of the steady state: those asked for, or the usual number, but at most a quarter of the run."""
    if asked is None:
        return min(usual, max(1, steps // 4))
    if asked >= steps:
        raise UserError(f"--warmup {asked} leaves nothing to measure: the run has {steps} steps. Ask for fewer.")
    return asked


def _settings(prepared: Prepared, weights: Path, warmup: int) -> dict[str, Any]:
    cfg, plan = prepared.cfg, prepared.plan
    optimizer = cfg.optimizer
    validation = prepared.validation
    return {
        "task": prepared.task.name,
        "problem_type": prepared.train.problem_type,
        "label_names": prepared.train.label_names,
        "device": plan.device,
        "precision": plan.precision,
        "asked_precision": asked_key(cfg),
        "seed": cfg.seed,
        "model": str(weights),
        "train_store": str(prepared.train.store.folder),
        "validation_store": str(validation.store.folder) if validation else None,
        "max_length": plan.max_length,
        "micro_batch_size": plan.micro_batch_size,
        "eval_batch_size": cfg.validation_dataloader.batch_size or max(SMALLEST_EVAL_BATCH, plan.micro_batch_size),
        "grad_acc_steps": plan.grad_acc_steps,
        "total_steps": plan.total_steps,
        "steps_per_epoch": plan.steps_per_epoch,
        "val_every_steps": plan.val_every_steps,
        "ckpt_every_steps": plan.ckpt_every_steps,
        "log_every_steps": cfg.step_scheduler.log_every_steps,
        "checkpoint": {
            "enabled": cfg.checkpoint.enabled,
            "keep_last": cfg.checkpoint.keep_last,
            "keep_best": cfg.checkpoint.keep_best,
            "best_metric": prepared.best_metric,
            "best_mode": prepared.best_mode,
        },
        "optimizer": {
            "name": optimizer_name(cfg),
            "lr": optimizer.lr,
            "weight_decay": optimizer.decay,
            "betas": list(optimizer.adam["betas"]),
            "eps": optimizer.adam["eps"],
            "decay_norms_and_biases": optimizer.decay_norms_and_biases,
        },
        "lr_scheduler": dataclasses.asdict(cfg.lr_scheduler),
        "gradient_clipping": cfg.training_optimizations.gradient_clipping,
        "label_smoothing": cfg.loss_fn.label_smoothing,
        "gradient_checkpointing": plan.checkpointing != "none",
        "shuffle": cfg.dataloader.shuffle is not False,
        "drop_last": cfg.dataloader.drop_last,
        "order": _order(prepared),
        "num_workers": cfg.dataloader.num_workers,
        "warmup_steps": warmup,
        "parameters": plan.parameters,
        "drawn": [*drawn_keys(prepared.hf_config), *(["peft.dropout"] if cfg.peft and cfg.peft.dropout else [])],
    }


def asked_key(cfg: RunConfig) -> str | None:
    """The key with which the config asks for a precision; None where it leaves the choice open."""
    if cfg.training_optimizations.bf16 is False and asked_precision(cfg)[0] == "auto":
        return "training_optimizations.bf16"
    return asked_precision(cfg)[1] or None


def _order(prepared: Prepared) -> dict[str, Any]:
    """What our loader makes the order of rows from; every side that can reads them in this order."""
    order = make_step_loader(prepared).order
    assert isinstance(order, StepOrder), "steps that count tokens are not compared"
    return {name: getattr(order, name) for name in ORDER}


def drawn_keys(hf_config: Any) -> list[str]:
    """Keys of the model's config that let it draw random numbers while it trains: dropout, noise before a router. Two
    runs then agree only on average."""
    found = []
    for name, value in hf_config.to_dict().items():
        draws = "drop" in name or "jitter" in name
        if draws and name not in OTHER_HEADS and isinstance(value, float) and value > 0:
            found.append(f"model.{name}")
    return found
