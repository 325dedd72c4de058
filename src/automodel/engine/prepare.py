"""Everything that happens before a weight is loaded: model config, tokenizer, data, plan.

Whatever can be wrong with the input is found in here, in seconds, and nothing is written except the token cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from automodel.adapters.attach import Adapter, count_trained
from automodel.config.dump import typed_at
from automodel.config.errors import UserError
from automodel.data.columns import did_you_mean
from automodel.data.overlap import held_out_and_learned
from automodel.data.prepare import PreparedData
from automodel.data.sizes import sizes_of
from automodel.distributed.layout import ONE, Layout, check_model
from automodel.distributed.world import ALONE, Alone
from automodel.engine.classes import class_notes
from automodel.engine.product_facts import product_facts
from automodel.engine.read_data import read_data
from automodel.engine.used_rows import ids_that_occur, plain_word_table
from automodel.metrics.compute import better, metric_called, metric_names
from automodel.models.adapted import adapter_for_run, refuse_adapter
from automodel.models.block_support import (
    can_fuse,
    can_fuse_adapters,
    can_pool,
    fused_in_words,
    pooled_saving,
    read_saving,
    whole_layers,
)
from automodel.models.checkpointing import layer_dropout
from automodel.models.config import ModelConfig
from automodel.models.decoder_parts import DECODERS
from automodel.models.families import FAMILIES, PackingSupport, packing_support
from automodel.models.fp8 import products
from automodel.models.head_form import head_form
from automodel.models.load import skeleton_of
from automodel.models.router import router_of
from automodel.models.streamed import require_shapes
from automodel.plan.batches import tokens_of_micro_batch
from automodel.plan.check import wrong_direction
from automodel.plan.compile_record import read_compile_facts
from automodel.plan.config import RunConfig
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.fp8 import asked_fp8
from automodel.plan.hardware import Hardware, read_hardware
from automodel.plan.layout import check_layout
from automodel.plan.memory import shape_or_why
from automodel.plan.plan import Plan
from automodel.tasks.infer import load_config
from automodel.tasks.loss import SupervisedLoss
from automodel.tasks.task import Task

SHARED_BY_CHANCE = 0.01  # of the held-out samples: public datasets have that many twins


@dataclass(frozen=True)
class Prepared:
    """A run that has everything but its weights."""

    cfg: RunConfig
    task: Task
    hf_config: Any
    tokenizer: Any
    train: PreparedData
    validation: PreparedData | None
    packing: PackingSupport
    loss: SupervisedLoss
    best_metric: str
    best_mode: str
    hardware: Hardware
    plan: Plan
    trust: tuple[str, ...]
    planned: Callable[[RunConfig], Plan]
    """The plan of another config for the same model, data and machine."""
    adapter: Adapter | None = field(default=None, kw_only=True)
    """What is trained beside the frozen model; none: the model itself."""
    ranks: Alone = ALONE
    """The processes that train together; this one among them."""
    layout: Layout = field(default=ONE, kw_only=True)
    """The grid they form."""

    @property
    def saved_kind(self) -> str:
        """What the run folder holds in the end: `model` or `adapter`."""
        return "model" if self.adapter is None else "adapter"

    def facts_of_data(self) -> dict[str, Any]:
        """What the data decides of the folder that is saved in the end. Checkpoints keep it, so that they can become
        one without the data."""
        return {
            "task": self.task.name,
            "num_labels": self.train.num_labels,
            "label_names": self.train.label_names,
            "problem_type": self.train.problem_type,
            "chat_template": self.train.chat_template,
            "segments": self.train.store.token_types is not None,
            "max_length": self.train.max_length,
        }


def prepare_run(
    cfg: RunConfig,
    trust: Sequence[str] = (),
    *,
    begun: Mapping[str, Any] | None = None,
    ranks: Alone = ALONE,
    planned_ranks: int | None = None,
    why_ranks: str = "",
    kept: dict[str, Any] | None = None,
) -> Prepared:
    """Config in, plan out. Raises `UserError` for everything a user can put right. `begun`: the plan of the run that is
    resumed; `kept`: what its adapter is. `planned_ranks`: for how many ranks, where only the plan is wanted.
    `why_ranks`: why so many."""
    size = planned_ranks or ranks.size
    layout = check_layout(cfg, size)
    if not (cfg.model.target or "").endswith(".from_config"):
        refuse_adapter(cfg.model.pretrained_model_name_or_path)
    with ranks.ahead():
        data = read_data(cfg, trust)
    task, tokenizer, train, validation = data.task, data.tokenizer, data.train, data.validation
    hf_config = load_config(cfg.model, task, train.num_labels, train.label_names, train.problem_type)
    packing = packing_support(hf_config, task.head, data.longest)
    check_model(cfg.distributed, layout, hf_config, packing.packed and cfg.packed_sequence.enabled is not False)
    best_metric, best_mode = _best(cfg, task, train.problem_type)
    loss = task.loss(cfg.loss_fn, train.problem_type, train.num_labels)
    hardware = read_hardware()
    skeleton = skeleton_of(cfg.model, hf_config, task.head)
    require_shapes(cfg.model, skeleton, task.head)
    adapter = None if cfg.peft is None else adapter_for_run(cfg.peft, cfg.model, skeleton, task.head, kept)
    _check_cut(adapter, layout)
    # Models outside the table of proven families may read rows that stand in no document (CPM-Ant's prompt).
    words = plain_word_table(skeleton) if hardware.device == "cpu" and hf_config.model_type in FAMILIES else None
    data_facts = _data_facts(
        cfg,
        data.hf_config,
        task,
        train,
        validation,
        len(words_read(train, words, tokenizer)) if words is not None else 0,
    )
    planned = partial(
        make_plan,
        task=task,
        hardware=hardware,
        model=model_facts(cfg, task, hf_config, packing, skeleton, adapter, words),
        data=data_facts,
        compiling=read_compile_facts(cfg, hf_config, hardware.device, hardware.name, (begun or {}).get("compile")),
        layout=layout,
        why_ranks=why_ranks,
        products=product_facts(
            hardware,
            skeleton,
            tokens_of_micro_batch(cfg, data_facts, layout.data_ranks),
            passes=3 if adapter is None else 2,
            ranks=ranks,
            planned_ranks=planned_ranks or 1,
            begun=begun,
        ),
    )
    return Prepared(
        cfg, task, hf_config, tokenizer, train, validation, packing, loss, best_metric, best_mode, hardware,
        planned(cfg), tuple(trust), planned, ranks,
        adapter=adapter, layout=layout,
    )  # fmt: skip


def _check_cut(adapter: Adapter | None, layout: Layout) -> None:
    """What an adapter that training starts from brings along; what the config says itself was refused before."""
    if adapter is None or layout.tp == 1 or not (adapter.dora or adapter.dropout):
        return
    which, advice = "is DoRA", "Use an adapter without it, or no tp_size."
    if not adapter.dora:
        which, advice = f"has {adapter.dropout:g}", "Say peft.dropout=0, or leave tp_size out."
    key = "use_dora" if adapter.dora else "dropout"
    later = "which comes in a later release for cut matrices (tp_size)"
    raise UserError(f"peft.{key}: the adapter that training starts from {which}, {later}. {advice}")


def model_facts(
    cfg: RunConfig, task: Task, hf_config: Any, packing: PackingSupport, skeleton: Any, adapter: Any, words: Any
) -> ModelFacts:
    """What the plan must know of the model. `words`: its word table, where rows of it may be left out."""
    shape, no_shape = shape_or_why(hf_config)
    router = router_of(skeleton)
    return ModelFacts(
        name=typed_at(cfg, "model.pretrained_model_name_or_path", cfg.model.pretrained_model_name_or_path),
        model_type=hf_config.model_type,
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        can_pack=packing.packed,
        packing_reason=packing.reason,
        can_fuse=can_fuse(hf_config) and (adapter is None or can_fuse_adapters(hf_config, adapter)),
        fused_in_words=fused_in_words(hf_config),
        decoder=hf_config.model_type in DECODERS,
        can_pool=can_pool(hf_config, fused=False),
        can_pool_fused=can_pool(hf_config, fused=True),
        whole_layers=whole_layers(hf_config),
        pooled_saving=pooled_saving(hf_config) if can_pool(hf_config, fused=True) else 0.0,
        read_saving=read_saving(hf_config),
        head_words=hf_config.vocab_size if task.head.next_token and head_form(hf_config) is not None else 0,
        shape=shape,
        no_shape=no_shape,
        word_rows=words.num_embeddings if words is not None else 0,
        products=tuple(products(skeleton, fused=False)) if asked_fp8(cfg) else (),
        products_fused=tuple(products(skeleton, fused=True)) if asked_fp8(cfg) and can_fuse(hf_config) else (),
        dropout="peft.dropout" if adapter is not None and adapter.dropout else layer_dropout(hf_config.to_dict()),
        trained=0 if adapter is None else count_trained(adapter, skeleton),
        adapter_in_words="" if adapter is None else adapter.in_words(),
        experts=sum(p.numel() for name, p in skeleton.named_parameters() if ".experts." in name and p.dim() == 3),
        balance=0.0 if router is None else router.weight,
    )


def _data_facts(
    cfg: RunConfig, begun: Any, task: Task, train: PreparedData, validation: PreparedData | None, word_rows: int
) -> DataFacts:
    """What the plan must know of the data. `begun`: the model's config before the data's classes were known;
    `word_rows`: rows of the word table that it reads, 0: not counted."""
    mixture = train.mixture
    return DataFacts(
        rows=mixture.total if mixture else train.stats.used,
        tokens=round(mixture.mean_tokens(train.store.lengths)) if mixture else train.stats.tokens,
        longest=int(train.store.lengths.max()),
        longest_whole=train.stats.longest,
        cuts=tuple(
            (section, cut)
            for section, data in (("dataset", train), ("validation_dataset", validation))
            if data is not None
            for cut in data.stats.cuts
        ),
        max_length=train.max_length,
        has_validation=validation is not None,
        validation_tokens=validation.stats.tokens if validation is not None else 0,
        splits=train.splits,
        notes=(*_notes(train, validation), *class_notes(cfg.model, begun, task, train)),
        columns=train.description,
        labels=labels_in_words(train, cfg.model, cfg.loss_fn.class_weights),
        lengths=train.store.lengths,
        sizes=partial(
            sizes_of,
            train.store,
            train.row_format.labels,
            mixture=mixture,
            shuffled=cfg.dataloader.shuffle is not False,
        ),
        word_rows=word_rows,
        learned=train.learned_share,
        mixture=mixture,
    )


def words_read(data: PreparedData, table: Any, tokenizer: Any) -> np.ndarray:
    """The rows of the word table that a step may read; none where they were not counted. What pads is among them: some
    models fill up sequences by themselves."""
    ids = ids_that_occur(data.store, table.num_embeddings, [table.padding_idx, tokenizer.pad_token_id])
    return np.empty(0, dtype=np.int64) if ids is None else ids


def labels_in_words(data: PreparedData, model: ModelConfig, weights: Sequence[float] | None = None) -> str:
    """`2 classes: neg, pos`; what was made of the labels, and which weight is whose, must not be a surprise at the
    end."""
    if data.problem_type == "regression":
        if model.problem_type:
            return "regression, as model.problem_type says"
        why = "model.num_labels is 1" if model.num_labels == 1 else "the labels are decimals"
        return f"regression, since {why}; for classes set model.problem_type"
    if data.num_labels is None:
        return data.stats.learned_in_words(data.row_format.labels == "target", data.learned_share)
    names = data.label_names or []
    if weights is not None:
        names = [f"{name} × {weight:g}" for name, weight in zip(names or range(len(weights)), weights)]
    listed = f": {', '.join(names[:6])}{', …' if len(names) > 6 else ''}" if names else ", numbered from 0"
    kind = "multi-label, " if data.problem_type == "multi_label_classification" else ""
    return f"{kind}{data.num_labels} classes{listed}"


def _notes(train: PreparedData, validation: PreparedData | None) -> tuple[str, ...]:
    if validation is None:
        return train.notes
    notes = (*train.notes, *validation.notes)
    if np.array_equal(train.store.input_ids, validation.store.input_ids):
        return (*notes, "validation_dataset has the same texts as dataset: its numbers say nothing about new data")
    shared, held_out = held_out_and_learned(train.store, validation.store), len(validation.store)
    if shared is not None and shared > SHARED_BY_CHANCE * held_out:
        found = f"{shared:,} of the {held_out:,} samples of validation_dataset are in dataset, too"
        notes += (f"{found}: its numbers look better than those of new data",)
    return notes


def _best(cfg: RunConfig, task: Task, problem_type: str | None) -> tuple[str, str]:
    """The metric that decides which checkpoint is best, and its direction."""
    asked = {
        "checkpoint.best_metric": cfg.checkpoint.best_metric,
        "early_stopping.metric": cfg.early_stopping.metric if cfg.early_stopping else None,
    }
    known = metric_names(task.metrics(problem_type))
    for key, name in asked.items():
        if name and metric_called(name) not in known:
            raise UserError(
                f"{key}: '{name}' is not measured for this task. Choose from {', '.join(known)}."
                + did_you_mean(name, known)
            )
    if wrong := wrong_direction(cfg):
        raise UserError(f"checkpoint.best_mode: {wrong}")
    metric = metric_called(next(filter(None, asked.values()), "loss"))
    return metric, better(metric)
