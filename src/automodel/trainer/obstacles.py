"""Why a Trainer's steps cannot be the engine's own: every obstacle, by name.

The engine's step computes one thing: the model's own loss over its own batches, clipped, with an optimizer that it
knows. Whoever puts something of their own inside a step (a loss, a hook, a wrapper) gets Trainer's step, with their
code in it, and a line that says so. The models still take padding out by themselves there (`models/drop_in.py`).
"""

from __future__ import annotations

import dis
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, TrainerCallback

from automodel.models.auto_class import classes_in_transformers
from automodel.models.changed import as_made, own_loss, what_changed
from automodel.models.families import packing_support
from automodel.models.packed_call import has_hooks, untouched
from automodel.tasks.registry import TASKS
from automodel.tasks.task import Task

INSIDE_A_STEP = (
    "compute_loss",
    "training_step",
    "get_train_dataloader",
    "get_batch_samples",
    "_get_num_items_in_batch",
    "_prepare_inputs",
    "_prepare_input",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "_inner_training_loop",
    "_run_epoch",
    "_prepare_for_training",
    "_clip_grad_norm",
    "_get_grad_norm",
    "floating_point_ops",
    "_wrap_model",
    "create_accelerator_and_postprocess",
)
"""Methods that a step calls; a subclass that has its own wants it called."""
EVENTS_INSIDE_A_STEP = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")
CAPTURED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_hf")


def task_of(model: Any) -> Task | None:
    """The task of a transformers model, by its class; none for another library's class, and none for encoder-decoders,
    whose source and target cannot be packed."""
    kind = type(model)
    if not isinstance(model, PreTrainedModel) or not kind.__module__.startswith("transformers.models."):
        return None
    packable = (task for task in TASKS if not task.head.encoder_decoder)
    return next((task for task in packable if kind.__name__ in classes_in_transformers(task.head).values()), None)


def own_method(trainer: Any, name: str, ours: type) -> bool:
    """Whether a subclass of this Trainer has its own version of a method."""
    return getattr(type(trainer), name, None) is not getattr(ours, name, None) or name in vars(trainer)


def why_stock(trainer: Any, ours: type) -> str | None:
    """Why Trainer's own steps must run; None where the engine's may. `ours`: the drop-in class itself."""
    for name in INSIDE_A_STEP:
        if own_method(trainer, name, ours):
            return f"{type(trainer).__name__} has a {name} of its own"
    return _model_obstacle(trainer) or _argument_obstacle(trainer) or _settings_obstacle(trainer)


def _model_obstacle(trainer: Any) -> str | None:
    model = trainer.model
    task = task_of(model)
    if task is None:
        return f"{type(model).__name__} is not one of transformers' classifiers or causal language models"
    support = packing_support(model.config, task.head)
    if not support.packed:
        return support.reason
    if not all(p.requires_grad for p in model.parameters()):
        return "some parameters are frozen"
    if len({p.dtype for p in model.parameters()}) > 1:
        return "parameters have several dtypes"
    changed = what_changed(model)
    if changed is not None:
        return changed
    if not untouched(model) or has_hooks(model) or not as_made(model):
        return "modules of the model were replaced, or have hooks"
    if own_loss(model, task.head):
        return "the model has a loss function of its own"
    if getattr(model, "hf_quantizer", None) is not None:
        return "the model is quantised"
    if model.is_gradient_checkpointing:
        return "gradient checkpointing is on"
    if model.config._attn_implementation not in ("sdpa", "flash_attention_2", "flash_attention_3"):
        return f"attention is {model.config._attn_implementation}"
    return None


def _argument_obstacle(trainer: Any) -> str | None:
    """What was handed to the constructor."""
    if trainer.compute_loss_func is not None:
        return "compute_loss_func is given"
    if getattr(trainer, "_given_optimizer", False):
        return "an optimizer or a scheduler was handed over"
    for callback in trainer.callback_handler.callbacks:
        for event in EVENTS_INSIDE_A_STEP:
            if getattr(type(callback), event, None) is not getattr(TrainerCallback, event):
                return f"{type(callback).__name__} has {event}, which looks inside a step"
    return None


def _settings_obstacle(trainer: Any) -> str | None:
    args, task = trainer.args, task_of(trainer.model)
    assert task is not None
    if args.world_size > 1 or args.n_gpu > 1 or trainer.is_model_parallel:
        return "several devices train together; `automodel finetune` has ranks of its own"
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or args.parallelism_config is not None:
        return "deepspeed, fsdp or parallelism_config is given"
    accumulates = args.gradient_accumulation_steps > 1
    by_tokens = task.head.wants == "tokens" or (task.head.next_token and not trainer.model_accepts_loss_kwargs)
    if accumulates and by_tokens:
        return "with gradient accumulation Trainer averages the loss of tokens batch by batch"
    switched_on = {
        "label_smoothing_factor": args.label_smoothing_factor != 0,
        "neftune_noise_alpha": args.neftune_noise_alpha is not None,
        "use_liger_kernel": args.use_liger_kernel,
        "auto_find_batch_size": args.auto_find_batch_size,
        "debug": bool(args.debug),
        "torch_empty_cache_steps": args.torch_empty_cache_steps is not None,
        "include_num_input_tokens_seen": args.include_num_input_tokens_seen != "no",
        "optim_target_modules": args.optim_target_modules is not None,
        "learning_rate": args.learning_rate == 0,
        "torch_compile": args.torch_compile and args.device.type == "cpu",
    }
    asked = [name for name, on in switched_on.items() if on]
    if asked:
        return f"{asked[0]}={getattr(args, asked[0])!r} belongs to Trainer's own step"
    if args.train_sampling_strategy == "batch_rebalance":
        return "train_sampling_strategy='batch_rebalance' makes batches of unequal numbers"
    if trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        return "accelerator_config asks for sync_each_batch"
    return _device_obstacle(trainer)


def _device_obstacle(trainer: Any) -> str | None:
    args = trainer.args
    kind = args.device.type
    if kind not in ("cpu", "cuda"):
        return f"the engine does not know {kind}"
    if kind == "cpu" and args.fp16:
        return "fp16 on the CPU"
    half = next(trainer.model.parameters()).dtype != torch.float32
    if half and (args.bf16 or args.fp16):
        return f"{trainer.model.dtype} weights under autocast"
    if half and trainer.model.dtype != torch.bfloat16:
        return f"weights are {trainer.model.dtype}"
    if kind == "cuda" and args.optim.value not in CAPTURED_OPTIMIZERS:
        return f"optim={args.optim.value!r} is not part of captured steps"
    if kind == "cuda" and (trainer.optimizer_cls_and_kwargs is not None or args.optim_args):
        return "optimizer_cls_and_kwargs or optim_args is given"
    freezes = next((c for c in trainer.callback_handler.callbacks if kind == "cuda" and freezes_parameters(c)), None)
    if freezes is not None:
        return f"{type(freezes).__name__} freezes parameters along the way"
    if kind == "cuda" and type(trainer).create_optimizer is not _stock_create_optimizer(trainer):
        return f"{type(trainer).__name__} makes an optimizer of its own"
    return None


def freezes_parameters(callback: Any) -> bool:
    """Whether the code of a callback sets `requires_grad`, which recorded steps would not see."""
    methods = (getattr(type(callback), name) for name in dir(type(callback)) if not name.startswith("__"))
    codes = [code for method in methods if (code := getattr(method, "__code__", None)) is not None]
    return any(
        word.argval == "requires_grad_" or (word.argval == "requires_grad" and word.opname == "STORE_ATTR")
        for code in codes
        for word in dis.get_instructions(code)
    )


def _stock_create_optimizer(trainer: Any) -> Any:
    return transformers.Trainer.create_optimizer
