"""What `train()` would stop at after hours, or at its first evaluation, said before its first step.

`metric_for_best_model` names a metric of an evaluation. Trainer looks it up when the first one is done, and stops with
a KeyError where there is none of that name. Which names there will be is known beforehand, unless code of the script
makes some: `compute_metrics`, a callback, a method of a subclass.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import TrainerCallback

from automodel.config.errors import UserError
from automodel.trainer.obstacles import own_method

ALWAYS = ("loss", "runtime", "samples_per_second", "steps_per_second")
SOMETIMES = ("model_preparation_time", "jit_compilation_time", "mem_")
"""How other names of Trainer's own begin."""
MAKES_METRICS = ("evaluate", "_evaluate", "evaluation_loop", "prediction_step", "log")
LABELS = {"label", "labels", "label_ids"}
ONLY_PADS = (
    transformers.DataCollatorWithPadding,
    transformers.DefaultDataCollator,
    transformers.DataCollatorForTokenClassification,
)


def check_start(trainer: Any) -> None:
    """Raises `UserError` where a training cannot be carried to its end."""
    if trainer.train_dataset is None and not own_method(trainer, "get_train_dataloader", trainer.ours()):
        raise UserError(
            f"{type(trainer).__name__}: there is nothing to train on; give the constructor a train_dataset."
        )
    check_best_metric(trainer)


def check_best_metric(trainer: Any) -> None:
    args = trainer.args
    asked = args.metric_for_best_model
    if asked is None or args.eval_strategy == "no" or not isinstance(asked, str):
        return
    wanted = asked if asked.startswith("eval_") else f"eval_{asked}"
    name = wanted.removeprefix("eval_")
    if any(own_method(trainer, method, trainer.ours()) for method in MAKES_METRICS) or _callbacks_measure(trainer):
        return
    parts = [f"{part}_" for part in trainer.eval_dataset] if isinstance(trainer.eval_dataset, dict) else [""]
    if name in trainer.metrics_beside_loss or name.startswith(SOMETIMES):
        return
    own = [name.removeprefix(part) for part in parts if name.startswith(part)]
    known = [f"eval_{part}{one}" for part in parts for one in ALWAYS]
    there = ", ".join([*known[:4], *(f"eval_{one}" for one in trainer.metrics_beside_loss)])
    if not own:
        raise UserError(
            f"metric_for_best_model={asked!r}: eval_dataset has several parts, so metrics carry their names: {there}. "
            "Name one of those, with the part's name."
        )
    if trainer.compute_metrics is None and not {*own} & {*ALWAYS} and not own[0].startswith(SOMETIMES):
        raise UserError(
            f"metric_for_best_model={asked!r}: no evaluation will have {wanted}, since there is no compute_metrics. "
            f"There will be {there}. Name one of those, or give compute_metrics."
        )
    if "loss" in own and not _has_labels(trainer):
        raise UserError(
            f"metric_for_best_model={asked!r}: eval_dataset has no labels, so no evaluation will have {wanted}. Add a "
            "column of labels, or name another metric."
        )


def _callbacks_measure(trainer: Any) -> bool:
    """Whether a callback of the script's may write metrics: it is given the dictionary."""
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        ours = kind.__module__.startswith(("transformers.", "automodel."))
        events = ("on_evaluate", "on_log", "on_prediction_step")
        if not ours and any(getattr(kind, event, None) is not getattr(TrainerCallback, event) for event in events):
            return True
    return False


def _has_labels(trainer: Any) -> bool:
    """Whether evaluated rows have labels; yes where that cannot be told."""
    given = trainer.eval_dataset
    for dataset in given.values() if isinstance(given, dict) else [given]:
        columns = getattr(dataset, "column_names", None)
        pads = type(trainer.data_collator) in ONLY_PADS or trainer.data_collator is transformers.default_data_collator
        if not pads or trainer.can_return_loss or not isinstance(columns, list):
            continue
        if not {*columns} & ({*trainer.label_names} | LABELS):
            return False
    return True
