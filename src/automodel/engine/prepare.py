"""Everything that happens before a weight is loaded: model config, tokenizer, data, plan.

Whatever can be wrong with the input is found in here, in seconds, and nothing is written except the token cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from automodel.config.errors import NotYetError, UserError
from automodel.config.gate import resolve_target
from automodel.data.config import DatasetConfig
from automodel.data.prepare import PreparedData, inherit, prepare
from automodel.losses.task_loss import TaskLoss, make_loss
from automodel.metrics.compute import better, metric_names
from automodel.models.block_support import can_fuse, can_pool, fused_in_words, pooled_saving
from automodel.models.families import PackingSupport, packing_support
from automodel.models.load import count_parameters, load_hf_config, load_tokenizer, model_limits, read_hf_config
from automodel.models.tasks import infer_task
from automodel.plan.check import not_yet
from automodel.plan.compile_record import read_compile_facts
from automodel.plan.config import RunConfig
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware, read_hardware
from automodel.plan.plan import Plan


@dataclass(frozen=True)
class Prepared:
    """A run that has everything but its weights."""

    cfg: RunConfig
    task: str
    hf_config: Any
    tokenizer: Any
    train: PreparedData
    validation: PreparedData | None
    packing: PackingSupport
    loss: TaskLoss
    best_metric: str
    best_mode: str
    hardware: Hardware
    plan: Plan
    trust: tuple[str, ...]
    planned: Callable[[RunConfig], Plan]
    """The plan of another config for the same model, data and machine."""


def prepare_run(cfg: RunConfig, trust: Sequence[str] = (), *, begun_compiled: bool | None = None) -> Prepared:
    """Config in, plan out. Raises `UserError` for everything a user can put right. `begun_compiled`: whether the run
    that is being resumed is compiled."""
    unbuilt = not_yet(cfg)
    if unbuilt:
        raise NotYetError("the config asks for what is not yet built\n" + "\n".join(f"  {p}" for p in unbuilt))
    task, hf_config = _task(cfg)
    tokenizer = load_tokenizer(cfg.model, hf_config)
    limits = model_limits(hf_config, task)

    def load(
        section: DatasetConfig, role: Literal["train", "validation"], like: PreparedData | None = None
    ) -> PreparedData:
        return prepare(
            section,
            task=task,
            tokenizer=tokenizer,
            max_positions=limits.max_positions,
            type_vocab_size=limits.type_vocab_size,
            role=role,
            like=like,
            num_labels=cfg.model.num_labels,
            problem_type=cfg.model.problem_type,
            resolved_target=custom_target(section, trust),
        )

    train = load(cfg.dataset, "train")
    validation = None
    if cfg.validation_dataset is not None:
        validation = load(inherit(cfg.dataset, cfg.validation_dataset), "validation", train)
    hf_config = load_hf_config(cfg.model, task, train.num_labels, train.label_names, train.problem_type)
    packing = packing_support(hf_config, task)
    best_metric, best_mode = _best(cfg, task, train.problem_type)
    loss = make_loss(cfg.loss_fn, task, train.problem_type, train.num_labels)
    hardware = read_hardware()
    planned = partial(
        make_plan,
        task=task,
        hardware=hardware,
        model=ModelFacts(
            name=cfg.model.pretrained_model_name_or_path,
            model_type=hf_config.model_type,
            parameters=count_parameters(hf_config, task),
            can_pack=packing.packed,
            packing_reason=packing.reason,
            can_fuse=can_fuse(hf_config),
            fused_in_words=fused_in_words(hf_config),
            can_pool=can_pool(hf_config, fused=False),
            can_pool_fused=can_pool(hf_config, fused=True),
            pooled_saving=pooled_saving(hf_config) if can_pool(hf_config, fused=True) else 0.0,
        ),
        data=DataFacts(
            rows=train.stats.used,
            tokens=train.stats.tokens,
            longest=int(train.store.lengths.max()),
            max_length=train.max_length,
            has_validation=validation is not None,
            notes=_notes(train, validation),
            columns=train.description,
            labels=labels_in_words(train),
            lengths=train.store.lengths,
            mixture=train.mixture,
        ),
        compiling=read_compile_facts(cfg, hf_config, hardware.device, hardware.name, begun_compiled),
    )
    return Prepared(
        cfg, task, hf_config, tokenizer, train, validation, packing, loss, best_metric, best_mode, hardware,
        planned(cfg), tuple(trust), planned,
    )  # fmt: skip


def labels_in_words(data: PreparedData) -> str:
    """`2 classes: neg, pos`; what was made of the labels must not be a surprise at the end."""
    if data.problem_type == "regression":
        return "regression, since the labels are decimals; for classes set model.problem_type"
    if data.num_labels is None:
        return ""
    names = data.label_names or []
    listed = f": {', '.join(names[:6])}{', …' if len(names) > 6 else ''}" if names else ", numbered from 0"
    kind = "multi-label, " if data.problem_type == "multi_label_classification" else ""
    return f"{kind}{data.num_labels} classes{listed}"


def _notes(train: PreparedData, validation: PreparedData | None) -> tuple[str, ...]:
    if validation is None:
        return train.notes
    notes = (*train.notes, *validation.notes)
    if np.array_equal(train.store.input_ids, validation.store.input_ids):
        notes += ("validation_dataset has the same texts as dataset: its numbers say nothing about new data",)
    return notes


def custom_target(section: DatasetConfig, trust: Sequence[str]) -> Any:
    """The object behind a dataset's own `_target_`; None where it names the built-in loading."""
    if section.target is None:
        return None
    return resolve_target(section.target, "dataset", section.extra, trust)


def _task(cfg: RunConfig) -> tuple[str, Any]:
    task = cfg.task or infer_task(cfg.model, cfg.dataset.target, None)
    if task is None:
        # Only the model's own config can still tell; it is small and is needed anyway.
        task = infer_task(cfg.model, cfg.dataset.target, read_hf_config(cfg.model))
    if task is None:
        raise UserError(
            "task: it cannot be told from the model or the dataset what to train. Add one line to the config:\n"
            "  task: text-classification   (or token-classification, causal-lm, seq2seq)"
        )
    return task, load_hf_config(cfg.model, task, cfg.model.num_labels, None, cfg.model.problem_type)


def _best(cfg: RunConfig, task: str, problem_type: str | None) -> tuple[str, str]:
    """The metric that decides which checkpoint is best, and its direction."""
    metric = cfg.checkpoint.best_metric or (cfg.early_stopping and cfg.early_stopping.metric) or "loss"
    known = metric_names(task, problem_type)
    if metric not in known:
        raise UserError(
            f"checkpoint.best_metric: '{metric}' is not measured for this task. Choose from {', '.join(known)}."
        )
    return metric, cfg.checkpoint.best_mode or better(metric)
