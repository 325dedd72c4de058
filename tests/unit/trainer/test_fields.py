"""Each honoured field of TrainingArguments changes what it says, in the engine's steps as in stock Trainer's.

Every case trains a tiny classifier for a few steps with stock Trainer and with ours; both must agree with each other in
everything that is observed, and differ from the default run in what the field is about.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset

from automodel.trainer.arguments import TrainingArguments
from automodel.trainer.fields import FIELDS
from automodel.trainer.trainer import Trainer
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
    "logging_nan_inf_filter": (False, "setting", {}),
    "eval_strategy": ("no", "evaluations", {"eval_steps": None}),
    "eval_steps": (1, "evaluations", {}),
    "eval_delay": (3, "evaluations", {}),
    "per_device_eval_batch_size": (2, "eval_batches", {}),
    "prediction_loss_only": (True, "metrics", {}),
    "eval_on_start": (True, "evaluations", {}),
    "eval_do_concat_batches": (False, "metrics", {}),
    "eval_accumulation_steps": (1, "setting", {}),
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
    "dataloader_persistent_workers": (True, "setting", {"dataloader_num_workers": 1}),
    "dataloader_prefetch_factor": (3, "setting", {"dataloader_num_workers": 1}),
    "train_sampling_strategy": ("sequential", "losses", {}),
    "length_column_name": ("size", "setting", {"train_sampling_strategy": "group_by_length"}),
    "full_determinism": (True, "determinism", {}),
    "label_smoothing_factor": (0.2, "losses", {}),
    "neftune_noise_alpha": (5.0, "losses", {}),
    "gradient_checkpointing": (True, "setting", {}),
    "torch_empty_cache_steps": (1, "setting", {}),
    "include_num_input_tokens_seen": ("non_padding", "tokens", {}),
}
SEEN_ALONE = ("setting", "workers", "determinism", "folder")
"""What shows its effect without a look at stock Trainer."""
OWN_STEPS = (
    "label_smoothing_factor", "neftune_noise_alpha", "gradient_checkpointing",
    "torch_empty_cache_steps", "include_num_input_tokens_seen",
)  # fmt: skip


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


def observed(kind, folder: Path, field: str, **options):
    model = copy.deepcopy(start())
    settings = {**BASE, **options}
    folder = folder / str(settings.pop("output_dir", "out"))
    counts, seen = Counts(), []
    torch.use_deterministic_algorithms(False)
    tokenizer = words()
    trainer = kind(
        model=model, args=TrainingArguments(str(folder), **settings), train_dataset=rows(20, 0),
        eval_dataset=rows(6, 1), data_collator=transformers.DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer, compute_metrics=functools.partial(metrics, seen), callbacks=[counts],
    )  # fmt: skip
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
        "setting": [getattr(trainer.args, field, None)] if field != "output_dir" else [],
    }
    torch.use_deterministic_algorithms(False)
    return trainer, found


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    made: dict = {}

    def get(field, needs):
        key = (field if "setting" in needs else "", str(needs))
        if key not in made:
            made[key] = observed(Trainer, tmp_path_factory.mktemp("default"), field, **needs)[1]
        return made[key]

    return get


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_look_through():
    """accelerate collects garbage before every training, and half a million imported objects take 0.2 s each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def differ(a, b):
    numbers = all(isinstance(x, float) for x in [*a, *b])
    return len(a) != len(b) or (not np.allclose(a, b, rtol=1e-6, atol=1e-9) if numbers else list(a) != list(b))


@pytest.mark.parametrize("field", CASES)
def test_the_field_is_honoured(field, tmp_path, default):
    value, about, needs = CASES[field]
    options = {**needs, field: value}
    trainer, ours = observed(Trainer, tmp_path / "ours", field, **options)
    stock = ours if about in SEEN_ALONE else observed(transformers.Trainer, tmp_path / "stock", field, **options)[1]
    assert trainer.acceleration.path == ("stock" if field in OWN_STEPS else "packed"), trainer.acceleration
    tolerance = 3e-2 if field == "bf16" else 1e-4
    for name, mine in ours.items():
        if all(isinstance(x, float) for x in mine):
            np.testing.assert_allclose(mine, stock[name], atol=tolerance, rtol=tolerance, err_msg=name)
        else:
            assert mine == stock[name], name
    if about == "setting":
        assert ours["setting"] == [value]
    else:
        assert differ(ours[about], default(field, needs)[about]), f"{field} changed nothing about {about}"


def test_the_table_has_every_field_and_no_other():
    own = {f.name for f in dataclasses.fields(transformers.TrainingArguments) if f.init}
    assert own == set(FIELDS)


def test_every_field_that_the_engine_honours_has_a_case_or_is_about_the_machine():
    of_the_machine = {
        "disable_tqdm", "report_to", "run_name", "use_cpu", "log_level", "skip_memory_metrics", "use_cache", "fp16",
        "tf32",
        "dataloader_pin_memory", "dataloader_in_order", "average_tokens_across_devices", "bf16_full_eval",
        "fp16_full_eval", "dataloader_multiprocessing_context", "remove_unused_columns", "label_names",
        "ignore_data_skip", "restore_callback_states_from_checkpoint",
    }  # fmt: skip
    engine = {name for name, field in FIELDS.items() if field.state == "engine"}
    assert engine - set(CASES) == of_the_machine


def test_compiling_on_the_cpu_is_left_to_trainers_own_steps():
    from automodel.trainer.obstacles import why_stock

    _, model = tiny("bert", "text-classification", pad_token_id=0)
    args = TrainingArguments("out", use_cpu=True, report_to="none")
    trainer = Trainer(model, args, train_dataset=rows(8, 0), processing_class=make_tokenizer())
    assert why_stock(trainer, Trainer) is None
    for name in ("torch_compile", "auto_find_batch_size", "use_liger_kernel", "debug"):
        before = getattr(args, name)
        setattr(args, name, True)
        assert name in why_stock(trainer, Trainer)
        setattr(args, name, before)
