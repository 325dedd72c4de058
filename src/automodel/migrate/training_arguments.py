"""`TrainingArguments` in the words of a config file.

A table, field by field: a path here, a function where one name is not enough, or a reason why it is left out. What has
Trainer's default value is not written, with two exceptions: Trainer trains in fp32 and ends with the last weights
unless it is told otherwise; a config that says nothing trains in bf16 where the GPU has it and ends with the best ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from automodel.migrate.document import Document
from automodel.migrate.old_names import OLD_NAMES, modern_arguments

PATHS = {
    "output_dir": "checkpoint.checkpoint_dir",
    "per_device_train_batch_size": "dataloader.batch_size",
    "per_device_eval_batch_size": "validation_dataloader.batch_size",
    "gradient_accumulation_steps": "step_scheduler.grad_acc_steps",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps",
    "lr_scheduler_type": "lr_scheduler.name",
    "warmup_steps": "lr_scheduler.warmup_steps",
    "label_smoothing_factor": "loss_fn.label_smoothing",
    "gradient_checkpointing": "training_optimizations.gradient_checkpointing",
    "tf32": "training_optimizations.tf32",
    "torch_compile_mode": "compile.mode",
    "use_liger_kernel": "model.use_liger_kernel",
    "save_total_limit": "checkpoint.keep_last",
    "metric_for_best_model": "checkpoint.best_metric",
    "dataloader_num_workers": "dataloader.num_workers",
    "dataloader_pin_memory": "dataloader.pin_memory",
    "dataloader_persistent_workers": "dataloader.persistent_workers",
    "dataloader_prefetch_factor": "dataloader.prefetch_factor",
    "dataloader_drop_last": "dataloader.drop_last",
    "seed": "seed",
}
"""Fields that are a key here."""

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5, "weight_decay": 0.0, "adam_epsilon": 1e-8, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "lr_scheduler_type": "linear", "warmup_steps": 0, "label_smoothing_factor": 0.0, "gradient_checkpointing": False,
    "use_liger_kernel": False, "dataloader_num_workers": 0, "dataloader_pin_memory": True,
    "dataloader_persistent_workers": False, "dataloader_drop_last": False, "seed": 42, "max_grad_norm": 1.0,
    "max_steps": -1, "num_train_epochs": 3.0, "optim": "adamw_torch_fused",
}  # fmt: skip
"""Values of Trainer that need not be written, since they are ours too, or change nothing here."""

WITHOUT_MEANING = (
    "do_train", "do_eval", "do_predict", "disable_tqdm", "remove_unused_columns", "report_to", "logging_first_step",
    "logging_nan_inf_filter", "log_level", "log_level_replica", "log_on_each_node", "skip_memory_metrics",
    "local_rank", "label_names", "length_column_name", "use_cpu", "average_tokens_across_devices",
    "eval_do_concat_batches", "prediction_loss_only", "eval_accumulation_steps", "accelerator_config",
    "save_only_model", "save_on_each_node", "ddp_backend", "ddp_timeout", "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "dataloader_in_order",
    "dataloader_multiprocessing_context", "eval_use_gather_object", "restore_callback_states_from_checkpoint",
    "ignore_data_skip", "use_cache", "torch_compile_backend", "logging_steps", "logging_strategy", "eval_steps",
    "save_steps", "adam_beta1", "adam_beta2", "lr_scheduler_kwargs", "fp16", "bf16", "include_num_input_tokens_seen",
    "eval_delay", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "bf16_full_eval",
    "fp16_full_eval", "full_determinism", "data_seed", "resume_from_checkpoint", "hub_token", "hub_strategy",
    "hub_private_repo", "hub_always_push", "hub_revision", "hub_model_id", "run_name", "greater_is_better",
    "batch_eval_metrics", "include_for_metrics", "torch_empty_cache_steps", "auto_find_batch_size",
    "liger_kernel_config", "gradient_checkpointing_kwargs", "max_steps", "fsdp_config",
)  # fmt: skip
"""Fields that change no result here, are read together with another one, or have a note of their own below."""

BLOCKED = {
    "neftune_noise_alpha": "noise on the embeddings (NEFTune) is not part of this trainer",
    "deepspeed": "DeepSpeed is not used here; `distributed.dp_size` shards with FSDP2",
    "parallelism_config": "layouts of accelerate are not read; see `distributed` in docs/ranks.md",
    "optim_target_modules": "GaLore and APOLLO are not part of this trainer",
    "optim_args": "optim_args belong to optimizers that are not part of this trainer",
}
"""Fields that would make another training of it."""

NOTED = {
    "push_to_hub": "the model stays in checkpoint.checkpoint_dir; upload that folder yourself",
    "fsdp": "set distributed.dp_size for several GPUs; on one there is nothing to shard",
    "eval_on_start": "there is no evaluation before the first step",
    "data_seed": "`seed` shuffles too",
    "full_determinism": "the order of data and dropout depend on `seed` alone; kernels are not forced",
    "auto_find_batch_size": "micro-batches are halved by themselves where they do not fit",
    "debug": "use the run's report",
    "enable_jit_checkpoint": "SIGTERM saves a checkpoint always",
}
"""Fields that are left out with a word."""

OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw",
    "adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit", "adamw_torch_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit", "paged_adamw_32bit": "paged_adamw_32bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "lion_32bit": "lion", "lion_8bit": "lion_8bit", "paged_lion_32bit": "paged_lion_32bit",
    "paged_lion_8bit": "paged_lion_8bit", "adafactor": "adafactor", "sgd": "sgd", "adagrad": "adagrad",
    "rmsprop": "rmsprop", "muon": "muon",
}  # fmt: skip
SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial",
    "constant", "constant_with_warmup", "inverse_sqrt", "warmup_stable_decay",
)  # fmt: skip

Lines = Mapping[str, int]


def carry_over(given: Mapping[str, Any], document: Document, lines: Lines | None = None) -> None:
    """Arguments (old names are understood) into the document. `lines`: where each stands in the source."""
    at = dict(lines or {})
    arguments, notes = modern_arguments(given)
    for text in notes:
        old = text.split("=")[0].split(" ")[0]
        document.note(at.get(old, 0), text)
        for name in arguments:  # the line of the old name is that of the new one
            if name not in at and old in at and name in text:
                at[name] = at[old]
    arguments = {name: _plain(value) for name, value in arguments.items()}
    _precision(arguments, document)
    if not arguments.get("load_best_model_at_end"):
        document.set("checkpoint.keep_best", False, "Trainer's default; without it: the best evaluation's weights")
    for name, value in arguments.items():
        _one(name, value, arguments, document, at.get(name, 0))


def _plain(value: Any) -> Any:
    """Enumerations as their words."""
    return getattr(value, "value", value)


def _one(name: str, value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    if name in DEFAULTS and value == DEFAULTS[name]:
        return
    if name in _FUNCTIONS:
        _FUNCTIONS[name](value, arguments, document, line)
    elif name in PATHS:
        if value is not None:
            document.set(PATHS[name], value, name)
    elif name in BLOCKED:
        if value not in (None, "", False, [], {}):
            document.block(line, f"{name}: {BLOCKED[name]}")
    elif name in NOTED:
        if value not in (None, "", False, [], {}):
            document.drop(line, f"{name}: {NOTED[name]}")
    elif name not in WITHOUT_MEANING:
        document.drop(line, f"{name}={value!r} has no counterpart")


def _precision(arguments: dict[str, Any], document: Document) -> None:
    key = "training_optimizations.precision"
    if arguments.get("bf16"):
        document.set(key, "bf16", "bf16=True")
    elif arguments.get("fp16"):
        document.set(key, "fp16", "fp16=True")
    else:
        document.set(key, "fp32", "Trainer's default; without it: bf16 where the GPU has it, much faster")


def _epochs(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    if (arguments.get("max_steps") or -1) > 0:
        return
    if value != int(value):
        document.block(line, f"num_train_epochs={value}: epochs are whole here; give max_steps instead")
    else:
        document.set("step_scheduler.num_epochs", int(value), "num_train_epochs")


def _max_steps(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    if value > 0:
        document.set("step_scheduler.max_steps", value, "max_steps")


def _optim(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    if value not in OPTIMIZERS:
        document.block(line, f"optim={value!r} is not part of this trainer")
    elif OPTIMIZERS[value] != "adamw":
        document.set("optimizer.name", OPTIMIZERS[value], f"optim={value}")


def _betas(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    both = [arguments.get("adam_beta1", 0.9), arguments.get("adam_beta2", 0.999)]
    document.set("optimizer.betas", both, "adam_beta1, adam_beta2")


def _schedule(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    if value not in SCHEDULES:
        document.block(line, f"lr_scheduler_type={value!r} is no function of the step, which schedules here are")
    else:
        document.set("lr_scheduler.name", value, "lr_scheduler_type")


def _schedule_options(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    if value:
        document.set("lr_scheduler.lr_scheduler_kwargs", value, "lr_scheduler_kwargs")


def _clipping(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    document.set("training_optimizations.gradient_clipping", value or None, "max_grad_norm")


def _compile(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    if value:
        document.set("compile.enabled", True, "torch_compile")


def _every(steps: str, target: str) -> Callable[[Any, dict[str, Any], Document, int], None]:
    """A strategy and its number of steps. Once an epoch is what happens here by itself."""

    def translate(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
        if value != "steps":
            return
        count = arguments.get(steps) or arguments.get("logging_steps") or 500
        if count < 1:
            document.note(line, f"{steps}={count} is a share of all steps; once an epoch instead")
        else:
            document.set(target, int(count), steps)

    return translate


def _log(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    if value is not None and value >= 1:
        document.set("step_scheduler.log_every_steps", int(value), "logging_steps")


def _save(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    if value == "no":
        document.note(line, "save_strategy='no': the final model is saved; checkpoint.enabled: false saves none")
    _every("save_steps", "step_scheduler.ckpt_every_steps")(value, arguments, document, line)


def _save_steps(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    if "save_strategy" not in arguments:
        _save("steps", arguments, document, line)


def _best(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    if value:
        document.set("checkpoint.keep_best", True, "load_best_model_at_end")


def _metric(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    if value is None:
        return
    name = str(value).removeprefix("eval_")
    if name not in ("loss", "accuracy", "f1", "precision", "recall", "matthews_correlation"):
        document.note(line, f"metric_for_best_model={value!r} is the script's own; here it must be one of the task's")
    document.set("checkpoint.best_metric", name, "metric_for_best_model")
    if arguments.get("greater_is_better") is not None:
        document.set("checkpoint.best_mode", "max" if arguments["greater_is_better"] else "min", "greater_is_better")


def _sampling(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    if value == "group_by_length":
        document.set("dataloader.group_by_length", True, "train_sampling_strategy (packed batches need none)")
    elif value == "sequential":
        document.set("dataloader.shuffle", False, "train_sampling_strategy")
    elif value not in (None, "random"):
        document.drop(line, f"train_sampling_strategy={value!r}: batches are packed, so lengths need no balance")


def _trackers(value: Any, arguments: dict[str, Any], document: Document, line: int) -> None:
    names = [value] if isinstance(value, str) else list(value or [])
    for name in names:
        if name in ("wandb", "mlflow", "tensorboard"):
            document.open(name)
            if name == "wandb" and arguments.get("run_name"):
                document.set("wandb.name", arguments["run_name"], "run_name")
        elif name not in ("none", "all"):
            document.drop(line, f"report_to={name!r} is not a tracker here")


_FUNCTIONS: dict[str, Callable[[Any, dict[str, Any], Document, int], None]] = {
    "num_train_epochs": _epochs,
    "max_steps": _max_steps,
    "optim": _optim,
    "adam_beta1": _betas,
    "adam_beta2": _betas,
    "lr_scheduler_type": _schedule,
    "lr_scheduler_kwargs": _schedule_options,
    "max_grad_norm": _clipping,
    "torch_compile": _compile,
    "eval_strategy": _every("eval_steps", "step_scheduler.val_every_steps"),
    "logging_steps": _log,
    "save_strategy": _save,
    "save_steps": _save_steps,
    "load_best_model_at_end": _best,
    "metric_for_best_model": _metric,
    "train_sampling_strategy": _sampling,
    "report_to": _trackers,
}
KNOWN = {*PATHS, *WITHOUT_MEANING, *BLOCKED, *NOTED, *_FUNCTIONS, *OLD_NAMES}
"""Every name that `carry_over` understands."""
