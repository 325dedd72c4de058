"""`transformers.Trainer` as a side.

Trainer runs as it is. The subclass below takes the counted tokens out of a batch, keeps each step's loss, makes the
learning-rate schedule the run's own, and reads the rows in the run's own order (`trainer_rows.py`); a callback tells
the recorder when a step begins and ends. Nothing here waits for the device inside the loop (`logging_steps` is the
run's own, not 1): being watched does not slow Trainer down.

A side that groups rows by length where the run does not keeps its own order: less padding is a part of its speed.

Two corrections make the comparison one of speed and not of bugs: for classifiers, Trainer is told that the model's
loss is a mean over the micro-batch (it assumes otherwise from the forward's `**kwargs`, and accumulation would then
multiply the gradient), and a decoder classifier gets the pad token it needs to find a row's last token.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from automodel.benchmark.machine import GpuWatch, LoadWatch, peak_memory
from automodel.benchmark.recorder import Recorder
from automodel.benchmark.sides import TrainerSettings
from automodel.benchmark.trainer_rows import TOKENS, RowsInOrder, StoreRows, make_collator
from automodel.data.order import StepOrder
from automodel.data.store import TokenStore
from automodel.optim.config import LRSchedulerConfig
from automodel.optim.schedule import Schedule
from automodel.tasks.registry import task_named

GPU_WORKERS = 4


class WatchedTrainer(Trainer):
    """Trainer that hands its losses and token counts to a recorder."""

    recorder: Recorder
    schedule: Schedule
    decay_everything: bool
    rows_in_order: RowsInOrder | None = None
    """None: Trainer's own sampler."""
    step_loss: torch.Tensor | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self.rows_in_order if self.rows_in_order is not None else super()._get_train_sampler(train_dataset)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        tokens = inputs.pop(TOKENS, 0)
        assert self.model is not None
        if self.model.training:
            self.recorder.count(tokens, len(inputs["input_ids"]))
        return super()._prepare_inputs(inputs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.step_loss = loss if self.step_loss is None else self.step_loss + loss
        return loss

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            peak, schedule = self.args.learning_rate, self.schedule
            optimizer = optimizer or self.optimizer
            assert optimizer is not None
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: schedule.lr_at(step, peak) / peak
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        if self.decay_everything:
            return [name for name, _ in model.named_parameters()]
        return super().get_decay_parameter_names(model)


class StepCallback(TrainerCallback):
    """Tells the recorder when a step begins and ends, and when something else comes in between."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.trainer: WatchedTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.mark("loop_start_s")  # model and optimizer are there, as where the other side's clock starts

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        pause = control.should_evaluate or control.should_save or state.global_step >= state.max_steps
        self.recorder.end(self.trainer.step_loss, pause=bool(pause))
        self.trainer.step_loss = None


def train_with_trainer(
    job: dict[str, Any], settings: TrainerSettings, output: Path, recorder: Recorder
) -> dict[str, Any]:
    """Trains, evaluates and saves with Trainer, and returns what the recorder cannot know."""
    recorder.mark("imports_s")
    if not settings.cudnn_attention:
        torch.backends.cuda.enable_cudnn_sdp(False)
    tokenizer: Any = AutoTokenizer.from_pretrained(job["model"])
    chosen = settings.chosen
    model = load_model(job, precision_of(job, settings), tokenizer, chosen.attention if chosen else None)
    trainer = build_trainer(job, settings, output, model, tokenizer, recorder)
    watch, load = GpuWatch(job["device"]), LoadWatch()
    load.start()
    watch.start()
    trainer.train()
    if job["val_every_steps"] and job["total_steps"] % job["val_every_steps"]:
        trainer.evaluate()  # the other side always evaluates once at the end
    recorder.finish()
    recorder.mark("loop_end_s")
    used = watch.stop() | load.stop()
    if job["checkpoint"]["enabled"]:
        trainer.save_model(str(output / "model"))
        tokenizer.save_pretrained(str(output / "model"))
    recorder.mark("end_s")
    return {
        **used,
        **peak_memory(job["device"]),
        "end_s": recorder.marks["end_s"],
        "precision": precision_of(job, settings),
        "attention": model.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "setup": described(job, settings, model.config._attn_implementation),
        "tried": [dataclasses.asdict(tried) for tried in settings.tried],
        "same_order": in_the_runs_order(job, settings),
        "validation": last_evaluation(trainer.state.log_history),
    }


def precision_of(job: dict[str, Any], settings: TrainerSettings) -> str:
    if settings.chosen is not None:
        return settings.chosen.precision
    return job["precision"] if settings.same_precision else "fp32"


def weights_dtype(job: dict[str, Any], precision: str) -> torch.dtype:
    """How the weights are held. Frozen ones need no masters, so an adapter in bf16 is trained over weights in bf16."""
    pure = precision == "bf16-pure" or (precision == "bf16" and "adapter" in job)
    return torch.bfloat16 if pure else torch.float32


def load_model(job: dict[str, Any], precision: str, tokenizer: Any, attention: str | None = None) -> Any:
    """The model as every side starts from it. Without `attention`, transformers chooses one."""
    asked = {} if attention is None else {"attn_implementation": attention}
    auto_class = getattr(transformers, task_named(job["task"]).head.auto_class)
    model = auto_class.from_pretrained(job["model"], dtype=weights_dtype(job, precision), **asked)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    if "adapter" in job:
        from peft import PeftModel

        return PeftModel.from_pretrained(model, job["adapter"], is_trainable=True)
    return model


def build_trainer(
    job: dict[str, Any], settings: TrainerSettings, output: Path, model: Any, tokenizer: Any, recorder: Recorder
) -> WatchedTrainer:
    task, pad = task_named(job["task"]), tokenizer.pad_token_id or 0
    pad_to = job["max_length"] if settings.padding == "max_length" else None
    stores = {role: job[f"{role}_store"] for role in ("train", "validation")}
    rows = {
        role: StoreRows(TokenStore.open(folder), task.rows.labels, pad, pad_to) if folder else None
        for role, folder in stores.items()
    }
    callback = StepCallback(recorder)
    trainer = WatchedTrainer(
        model=model,
        args=TrainingArguments(**training_options(job, settings, output)),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        data_collator=make_collator(
            tokenizer, task.rows.labels, settings.padding, 8 if job["device"] == "cuda" else None
        ),
        processing_class=tokenizer,
        compute_metrics=metrics_function(job) if task.rows.labels == "document" else None,
        callbacks=[callback],
    )
    callback.trainer, trainer.recorder = trainer, recorder
    trainer.schedule = Schedule(LRSchedulerConfig(**job["lr_scheduler"]), job["total_steps"])
    trainer.decay_everything = job["optimizer"]["decay_norms_and_biases"]
    if in_the_runs_order(job, settings):
        lengths = TokenStore.open(job["train_store"]).lengths
        trainer.rows_in_order = RowsInOrder(StepOrder(lengths=lengths, **job["order"]))
    if not task.head.next_token:
        trainer.model_accepts_loss_kwargs = False  # their loss is a mean over the micro-batch, whatever is passed in
    return trainer


def training_options(job: dict[str, Any], settings: TrainerSettings, output: Path) -> dict[str, Any]:
    """The run's settings in the words of `TrainingArguments`."""
    optimizer, precision = job["optimizer"], precision_of(job, settings)
    options: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": job["total_steps"],
        "per_device_train_batch_size": job["micro_batch_size"],
        "per_device_eval_batch_size": job["eval_batch_size"],
        "gradient_accumulation_steps": job["grad_acc_steps"],
        "learning_rate": optimizer["lr"],
        "weight_decay": optimizer["weight_decay"],
        "adam_beta1": optimizer["betas"][0],
        "adam_beta2": optimizer["betas"][1],
        "adam_epsilon": optimizer["eps"],
        "max_grad_norm": job["gradient_clipping"] or 0.0,
        "label_smoothing_factor": job["label_smoothing"],
        "seed": job["seed"],
        "logging_steps": job["log_every_steps"],
        "eval_strategy": "steps" if job["val_every_steps"] else "no",
        "dataloader_drop_last": job["drop_last"],
        "dataloader_pin_memory": job["device"] == "cuda",
        "prediction_loss_only": task_named(job["task"]).rows.labels != "document",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": job["device"] == "cpu",
    }
    if job["val_every_steps"]:
        options["eval_steps"] = job["val_every_steps"]
    if optimizer["name"] == "sgd":
        options["optim"] = "sgd"
    elif settings.fused_adamw:
        options["optim"] = "adamw_torch_fused"
    if precision in ("bf16", "fp16"):
        options[precision] = True
    if precision == "tf32":
        options["tf32"] = True
    if job["gradient_checkpointing"]:
        options |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if settings.compile:
        options["torch_compile"] = True
    return options | _sampling(job, settings) | _workers(job, settings) | _saving(job)


def in_the_runs_order(job: dict[str, Any], settings: TrainerSettings) -> bool:
    """Whether this side reads the rows in the run's own order."""
    return not (settings.group_by_length and job["shuffle"]) or job["order"]["group_by_length"]


def _sampling(job: dict[str, Any], settings: TrainerSettings) -> dict[str, Any]:
    return {} if in_the_runs_order(job, settings) else {"train_sampling_strategy": "group_by_length"}


def _workers(job: dict[str, Any], settings: TrainerSettings) -> dict[str, Any]:
    workers = 0
    if settings.workers:
        workers = job["num_workers"]
        if workers is None:
            workers = GPU_WORKERS if job["device"] == "cuda" else 0
    return {"dataloader_num_workers": workers, "dataloader_persistent_workers": workers > 0}


def _saving(job: dict[str, Any]) -> dict[str, Any]:
    checkpoint, every = job["checkpoint"], job["ckpt_every_steps"]
    if not checkpoint["enabled"]:
        return {"save_strategy": "no"}
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": every,
        "save_total_limit": checkpoint["keep_last"],
    }
    validate = job["val_every_steps"]
    known = checkpoint["best_metric"] == "loss" or task_named(job["task"]).rows.labels == "document"
    if checkpoint["keep_best"] and validate and every % validate == 0 and known:
        options |= {
            "load_best_model_at_end": True,
            "metric_for_best_model": checkpoint["best_metric"],
            "greater_is_better": checkpoint["best_mode"] == "max",
        }
    return options


def metrics_function(job: dict[str, Any]) -> Any:
    """The same metrics as the other side, from Trainer's arrays."""

    def metrics(predictions: Any) -> dict[str, float]:
        from automodel.metrics.compute import compute_metrics

        logits, labels = np.asarray(predictions.predictions), np.asarray(predictions.label_ids)
        found = compute_metrics(
            task_named(job["task"]).metrics(job["problem_type"]), logits, labels, job["label_names"]
        )
        return {name: value for name, value in found.values.items() if name != "loss"}

    return metrics


def last_evaluation(history: list[dict[str, Any]]) -> dict[str, float] | None:
    evaluations = [entry for entry in history if "eval_loss" in entry]
    if not evaluations:
        return None
    technical = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time")
    return {
        name.removeprefix("eval_"): float(value)
        for name, value in evaluations[-1].items()
        if name.startswith("eval_") and name not in technical
    }


def described(job: dict[str, Any], settings: TrainerSettings, attention: str) -> str:
    """The side in a few words, for the table."""
    precision, chosen = precision_of(job, settings), settings.chosen is not None
    words = [f"{precision} (the run: {job['precision']})" if chosen and precision != job["precision"] else precision]
    words.append(f"padded to {job['max_length']}" if settings.padding == "max_length" else "dynamic padding")
    if not in_the_runs_order(job, settings) or job["order"]["group_by_length"]:
        words.append("grouped by length")
    words.append(f"{attention} attention")
    if job["device"] == "cuda" and not settings.cudnn_attention:
        words.append("cuDNN attention off")
    if settings.compile:
        words.append("compiled")
    if len(settings.tried) > 1:
        words.append(f"the fastest of {len(settings.tried)} that were tried")
    return ", ".join(words)
