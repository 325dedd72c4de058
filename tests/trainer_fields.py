"""What the tests of TrainingArguments' fields share: a tiny classifier, its rows, one observed training, and the cases.

A case is a value, what it changes about a training, and the settings that it needs. Fields whose effect shows itself
elsewhere (in log files, in a resumed run, in a loader) have a test of their own, marked with `shows`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from datasets import Dataset

from automodel.trainer.arguments import TrainingArguments
from tiny_models import tiny
from tiny_runs import make_tokenizer

BASE = {
    "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1, "report_to": "none",
    "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2,
}  # fmt: skip
SAVES = {"save_strategy": "steps", "save_steps": 2}

# field: (value, what it changes, settings that it needs)
CASES: dict[str, tuple] = {
    "output_dir": ("other", "folder", SAVES),
    "per_device_train_batch_size": (7, "losses", {}),
    "num_train_epochs": (1, "steps", {"max_steps": -1}),
    "max_steps": (2, "steps", {}),
    "learning_rate": (2e-3, "rates", {}),
    "lr_scheduler_type": ("cosine", "rates", {}),
    "lr_scheduler_kwargs": ({"num_cycles": 2}, "rates", {"lr_scheduler_type": "cosine_with_restarts"}),
    "warmup_steps": (2, "rates", {}),
    "optim": ("sgd", "weights", {"learning_rate": 0.1}),
    "optim_args": ("momentum=0.9", "weights", {"optim": "sgd", "learning_rate": 0.1}),
    "weight_decay": (0.5, "weights", {"learning_rate": 1e-2}),
    "adam_beta1": (0.5, "weights", {}),
    "adam_beta2": (0.5, "weights", {}),
    "adam_epsilon": (1e-2, "weights", {}),
    "max_grad_norm": (1e-3, "weights", {"optim": "sgd", "learning_rate": 0.1}),
    "gradient_accumulation_steps": (2, "losses", {}),
    "bf16": (True, "losses", {}),
    "logging_strategy": ("epoch", "log_lines", {}),
    "logging_steps": (2, "log_lines", {}),
    "logging_first_step": (True, "log_lines", {"logging_steps": 3}),
    "logging_nan_inf_filter": (False, "losses", {"learning_rate": 1e25, "eval_strategy": "no", "eval_steps": None}),
    "eval_strategy": ("no", "evaluations", {"eval_steps": None}),
    "eval_steps": (1, "evaluations", {}),
    "eval_delay": (3, "evaluations", {}),
    "per_device_eval_batch_size": (2, "eval_batches", {}),
    "prediction_loss_only": (True, "metrics", {}),
    "eval_on_start": (True, "evaluations", {}),
    "eval_do_concat_batches": (False, "metrics", {}),
    "include_for_metrics": (["inputs"], "metrics", {}),
    "batch_eval_metrics": (True, "metrics", {}),
    "save_strategy": ("steps", "files", {"save_steps": 2}),
    "save_steps": (1, "files", {"save_strategy": "steps"}),
    "save_total_limit": (1, "files", SAVES),
    "save_only_model": (True, "files", SAVES),
    "load_best_model_at_end": (True, "best", SAVES),
    "metric_for_best_model": ("accuracy", "best", {**SAVES, "load_best_model_at_end": True}),
    "greater_is_better": (True, "best", {**SAVES, "load_best_model_at_end": True, "metric_for_best_model": "loss"}),
    "seed": (7, "losses", {}),
    "data_seed": (7, "losses", {}),
    "dataloader_drop_last": (True, "steps", {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 6}),
    "dataloader_num_workers": (1, "workers", {}),
    "train_sampling_strategy": ("sequential", "losses", {}),
    "length_column_name": (
        "size", "losses", {"train_sampling_strategy": "group_by_length", "remove_unused_columns": False},
    ),
    "full_determinism": (True, "determinism", {}),
    "label_smoothing_factor": (0.2, "losses", {}),
    "neftune_noise_alpha": (5.0, "losses", {}),
    "include_num_input_tokens_seen": ("non_padding", "tokens", {}),
}  # fmt: skip
SEEN_ALONE = ("workers", "determinism", "folder")
"""What shows its effect without a look at stock Trainer."""
OWN_STEPS = ("label_smoothing_factor", "neftune_noise_alpha", "include_num_input_tokens_seen", "length_column_name")

SHOWN: set[str] = set()
"""Fields with a test of their own."""


def shows(*fields: str) -> Callable:
    """Marks a test as the one that shows the effect of these fields."""
    SHOWN.update(fields)
    return lambda test: test


@functools.cache
def rows(count, seed):
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        ids = random.integers(5, 40, int(random.integers(3, 20))).tolist()
        made.append({"input_ids": ids, "attention_mask": [1] * len(ids), "label": ids[0] % 3, "size": (index * 7) % 20})
    return Dataset.from_list(made)


@functools.cache
def start():
    return tiny("bert", "text-classification", pad_token_id=0, num_labels=3, num_hidden_layers=1)[1]


words = functools.cache(make_tokenizer)


class Counts(transformers.TrainerCallback):
    def __init__(self):
        self.predictions = 0

    def on_prediction_step(self, *args, **kwargs):
        self.predictions += 1


def metrics(seen, prediction, compute_result=True):
    first = prediction.predictions[0] if isinstance(prediction.predictions, list) else prediction.predictions
    seen.append((type(prediction.predictions).__name__, len(first), prediction.inputs is not None))
    return {"accuracy": float((np.asarray(first).argmax(-1) == 0).mean())}


def made(kind, folder: Path, given=None, **options):
    """A Trainer over the tiny classifier. `given`: for its constructor; the rest are fields."""
    tokenizer = words()
    parts = {
        "model": copy.deepcopy(start()), "train_dataset": rows(20, 0), "eval_dataset": rows(6, 1),
        "data_collator": transformers.DataCollatorWithPadding(tokenizer), "processing_class": tokenizer,
    }  # fmt: skip
    return kind(args=TrainingArguments(str(folder), **BASE | options), **parts | (given or {}))


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def observed(kind, folder: Path, **options):
    folder = folder / str(options.pop("output_dir", "out"))
    counts, seen = Counts(), []
    torch.use_deterministic_algorithms(False)
    given = {"compute_metrics": functools.partial(metrics, seen), "callbacks": [counts]}
    trainer = made(kind, folder, given, **options)
    trainer.train()
    history = trainer.state.log_history
    found = {
        "folder": str(Path(trainer.args.output_dir).name),
        "losses": [e["loss"] for e in history if "loss" in e],
        "rates": [e["learning_rate"] for e in history if "learning_rate" in e],
        "steps": [trainer.state.global_step, round(trainer.state.epoch, 6)],
        "weights": [float(p.detach().double().norm()) for p in trainer.model.parameters()],
        "log_lines": [len(history)],
        "evaluations": [e["step"] for e in history if "eval_loss" in e],
        "eval_losses": [e["eval_loss"] for e in history if "eval_loss" in e],
        "eval_batches": [counts.predictions],
        "metrics": [str(seen), str(["eval_accuracy" in e for e in history])],
        "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()),
        "best": [str(trainer.state.best_metric), str(trainer.state.best_model_checkpoint).rpartition("/")[2]],
        "tokens": [trainer.state.num_input_tokens_seen],
        "workers": [trainer.callback_handler.train_dataloader.num_workers],
        "determinism": [torch.are_deterministic_algorithms_enabled()],
    }
    torch.use_deterministic_algorithms(False)
    return trainer, found
