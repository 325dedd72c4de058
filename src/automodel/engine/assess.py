"""`assess`: measure a saved model on held-out data, as training measured it.

The run's own config decides columns, lengths, batch size, precision and loss, so that the numbers are those of the
run's last validation. What the labels mean comes from the saved model itself (its class names and problem type): the
training data need not be there any more. A plain Hugging Face folder can be measured too, with `--dataset`.

Loss and perplexity of a language model say how likely it finds the right answers. Whether it gives them is another
question: with `Generating` it answers the prompts of the data (`questions.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from automodel.adapters.peft_folder import is_adapter_folder
from automodel.config.errors import UserError
from automodel.config.gate import REMOTE_DATA
from automodel.config.written import as_written
from automodel.data.chat import template_text
from automodel.data.collate import PackedCollator, PaddedCollator
from automodel.data.columns import LABEL, Columns
from automodel.data.config import DatasetConfig
from automodel.data.inheritance import inherit
from automodel.data.label_kinds import all_listed, is_whole_number, unique_values
from automodel.data.labels import SINGLE, LabelMap
from automodel.data.loader import EvalLoader
from automodel.data.prepare import PreparedData, prepare
from automodel.data.sources import load_rows
from automodel.engine.answering import TOKENS
from automodel.engine.evaluate import Evaluator
from automodel.engine.known_tokens import check_tokens
from automodel.engine.product_facts import product_facts
from automodel.engine.questions import Generating, answer, questions_of
from automodel.engine.read_data import custom_target
from automodel.engine.same_kind import check_kind
from automodel.engine.saved import SavedModel, open_saved, quoted, require_model
from automodel.engine.step import autocast
from automodel.engine.steps import make_eager_forward, precision_around
from automodel.metrics.compute import EvalMetrics
from automodel.models.block_support import can_pool, whole_layers
from automodel.models.families import PackingSupport, packing_support
from automodel.models.load import count_parameters, model_limits, skeleton_of
from automodel.plan.config import RunConfig
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import read_hardware
from automodel.plan.plan import Plan
from automodel.tasks.task import Task


@dataclass(frozen=True)
class Assessment:
    """What was measured, on what."""

    folder: Path
    task: Task
    problem_type: str | None
    dataset: str
    split: str | None
    data: PreparedData
    metrics: EvalMetrics
    label_names: list[str] | None
    device: str
    precision: str
    seconds: float
    asked: int | None = None
    """Prompts that were to be answered by generating; None where nobody asked for that."""
    unanswered: int = 0
    """Those that the model has no room for; they count as wrong answers."""

    notes: tuple[str, ...] = ()
    """What a person should know who compares the numbers."""

    def to_json(self) -> dict[str, Any]:
        stats = self.data.stats
        return {
            "model": str(self.folder),
            "task": self.task.name,
            "problem_type": self.problem_type,
            "dataset": self.dataset,
            "split": self.split,
            "rows": stats.rows,
            "used": stats.used,
            "skipped": stats.skipped,
            "truncated": stats.truncated,
            "truncated_targets": stats.truncated_targets,
            "longest": stats.longest,
            "notes": list(self.notes),
            "metrics": {name: value if value == value else None for name, value in self.metrics.values.items()},
            "label_names": self.label_names,
            "confusion_matrix": self.metrics.confusion_matrix,
            "device": self.device,
            "precision": self.precision,
            "seconds": round(self.seconds, 3),
            **({} if self.asked is None else {"asked": self.asked, "unanswered": self.unanswered}),
        }


def assess(
    folder: str | Path,
    *,
    files: Sequence[Path] = (),
    settings: Sequence[str] = (),
    dataset: str | None = None,
    split: str | None = None,
    trust: Sequence[str] = (),
    generating: Generating | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Assessment:
    """Evaluates the model of a run folder on its validation data, or on `dataset`. `on_progress` is told of generated
    answers."""
    saved = _opened(folder, files, settings, dataset, trust)
    if generating is not None and not saved.task.head.next_token:
        raise UserError(f"--generate is for causal language models; '{saved.folder}' holds a {saved.task} model.")
    cfg = saved.run
    assert cfg is not None
    asked_now = bool(files) or any("chat_template" in setting for setting in settings)
    written = _written(cfg, saved.folder, dataset, split)
    section = _with_template(saved, _held_out(cfg, written, split), asked_now)
    listed = bool(files) or written.labels is not None or any(".labels=" in setting for setting in settings)
    data = _prepared(saved, cfg, section, written, listed, trust)
    packing = packing_support(saved.hf_config, saved.task.head)
    plan = _plan(saved, cfg, data, packing)
    unanswered = 0
    asked = None if generating is None else questions_of(saved, section, data, generating, trust)  # before any weights
    started = time.perf_counter()
    metrics = _evaluator(saved, cfg, data, packing, plan)()
    if generating is not None and asked is not None:
        scores, unanswered = answer(saved, asked, generating, plan.device, on_progress)
        metrics = replace(metrics, values=metrics.values | scores)
    return Assessment(
        folder=saved.folder,
        task=saved.task,
        problem_type=saved.problem_type,
        dataset=as_written(section.path or section.target or ""),
        split=section.split or data.split,
        data=data,
        metrics=metrics,
        label_names=saved.label_names if saved.task.head.has_classes else None,
        device=plan.device,
        precision=plan.precision,
        seconds=time.perf_counter() - started,
        asked=None if asked is None else len(asked.prompts),
        unanswered=unanswered,
        notes=(*data.notes, *_unlike_training(cfg)),
    )


def _unlike_training(cfg: RunConfig) -> Iterator[str]:
    if cfg.quantization is not None:
        yield (
            "the adapter is measured beside the base as it was saved; in training the base was held in few bits, so "
            "the run's own numbers differ a little"
        )


def _opened(folder, files, settings, dataset: str | None, trust) -> SavedModel:
    root = require_model(folder)
    if not (root / "run" / "config.yaml").is_file() and not files:
        if dataset is None:
            raise UserError(
                f"'{root}' has no run/config.yaml that would name its data. Say what to measure: --dataset."
            )
        settings = [f"dataset.path={quoted(dataset)}", *settings]
    return open_saved(root, files=files, settings=settings, trust=trust)


def _written(cfg: RunConfig, root: Path, dataset: str | None, split: str | None) -> DatasetConfig:
    """The section that is measured, as somebody wrote it."""
    section = cfg.validation_dataset
    if dataset is not None:
        rest = section or DatasetConfig()
        section = replace(
            rest, path=dataset, mixture=None, split=None, target=None, name=None, data_files=None, revision=None,
            num_samples_limit=None, extra={}, column_names=None,
        )  # fmt: skip
    if section is None and split is None:
        raise UserError(
            f"the run in '{root}' has no validation_dataset. Name the data to measure it on with --dataset, or another "
            "split of its training data with --split."
        )
    return section or DatasetConfig()


def _held_out(cfg: RunConfig, written: DatasetConfig, split: str | None) -> DatasetConfig:
    """The same with everything that it leaves open taken from the training data's section."""
    section = inherit(cfg.dataset, written)
    return replace(section, split=split) if split is not None else section


def _with_template(saved: SavedModel, section: DatasetConfig, asked_now: bool) -> DatasetConfig:
    """The section as the tokenizer's own chat template writes it. A run saved the one it was trained with, whose file
    may be elsewhere by now; one that is asked for here becomes the tokenizer's."""
    if section.chat_template is not None and (asked_now or not saved.tokenizer.chat_template):
        saved.tokenizer.chat_template = template_text(section.chat_template, "dataset")
    return replace(section, chat_template=None)


def _prepared(
    saved: SavedModel,
    cfg: RunConfig,
    section: DatasetConfig,
    written: DatasetConfig,
    listed: bool,
    trust: Sequence[str],
) -> PreparedData:
    """`listed`: whether somebody says what numbers stand for in these data. What training data's numbers stood for says
    nothing about others."""
    limits = model_limits(saved.hf_config, saved.task.head)
    section, target = saved.as_long(section, limits.max_positions), custom_target(section, trust)
    remote = REMOTE_DATA in trust
    labels = _labels(saved, section, target, remote)
    like: Any = None if labels is None else _Classes(labels)
    data = prepare(
        section if listed else replace(section, labels=None),
        row_format=saved.task.rows,
        tokenizer=saved.tokenizer,
        max_positions=limits.max_positions,
        type_vocab_size=limits.type_vocab_size,
        role="validation",
        like=like,
        resolved_target=target,
        remote=remote,
        written=written,
    )
    check_kind(cfg.dataset, saved.layout, data, section)
    check_tokens(data.store, saved.tokenizer, saved.hf_config, "validation_dataset")
    return data


@dataclass(frozen=True)
class _Classes:
    """Stands where `prepare` expects the training data: all it takes from there is the classes."""

    label_map: LabelMap


def _labels(saved: SavedModel, section: DatasetConfig, target: Any, remote: bool) -> LabelMap | None:
    """What the saved model's logits stand for, as a map for the data's labels."""
    if not saved.task.head.has_classes:
        return None
    count, names = saved.hf_config.num_labels, tuple(saved.label_names) if saved.has_own_names else None
    problem = saved.problem_type or SINGLE
    if problem == "regression":
        return LabelMap(problem, count, names)  # of several targets, the names tell which is which
    # Names that are numbers (1 to 5 stars) came from the data's own integers, which are then names and not ids. Where
    # classes were listed, it is as in training: they are names if all of them are on the list.
    numbers = names is not None and all(is_whole_number(name) for name in names)
    if numbers and section.labels and problem == SINGLE and saved.task.rows.labels == "document":
        rows, label = _label_column(saved, section, target, remote)
        numbers = all_listed(unique_values(rows, label), names or ())
    return LabelMap(problem, count, names, ids_allowed=not numbers, origin="the model's classes")


def _label_column(saved: SavedModel, section: DatasetConfig, target: Any, remote: bool) -> tuple[Any, str]:
    given: Any = {"resolved_target": target, "tokenizer": saved.tokenizer, "remote": remote}
    rows = load_rows(section, role="validation", **given)
    columns = Columns(rows.features, "validation_dataset")
    named = section.label_column or (section.column_mapping or {}).get("label")
    label = named or columns.first_of(LABEL, "label_column", "the label")
    return rows, columns.required(label, "label_column")


def _plan(saved: SavedModel, cfg: RunConfig, data: PreparedData, packing: PackingSupport) -> Plan:
    """The run's plan for this machine; only device, precision, batch size and layers matter here."""
    by_examples = replace(cfg.packed_sequence, packed_sequence_size=0)
    cfg = replace(cfg, dataloader=replace(cfg.dataloader, drop_last=False), packed_sequence=by_examples)
    hardware, hf_config = read_hardware(), saved.hf_config
    adapted = is_adapter_folder(saved.folder)
    skeleton = skeleton_of(saved.source, hf_config, saved.task.head)
    return make_plan(
        cfg,
        saved.task,
        hardware,
        ModelFacts(
            name=str(saved.folder),
            model_type=saved.hf_config.model_type,
            parameters=count_parameters(
                saved.hf_config, saved.task.head, trust_remote_code=saved.source.trust_remote_code
            ),
            can_pack=packing.packed,
            packing_reason=packing.reason,
            can_pool=hardware.device == "cpu" and can_pool(hf_config, fused=False),
            whole_layers=whole_layers(hf_config),
            trained=int(adapted),
        ),
        DataFacts(
            rows=data.stats.used,
            tokens=data.stats.tokens,
            longest=int(data.store.lengths.max()),
            max_length=data.max_length,
            has_validation=True,
        ),
        products=product_facts(hardware, skeleton, TOKENS, passes=1),
    )


def _evaluator(saved: SavedModel, cfg: RunConfig, data: PreparedData, packing: PackingSupport, plan: Plan) -> Evaluator:
    batch_size = cfg.validation_dataloader.batch_size or max(16, plan.micro_batch_size)
    if plan.path == "packed":
        collate: Any = PackedCollator(
            data.store,
            saved.task.rows.labels,
            packing.pooling or "first",
            max_seqlen=data.max_length,
            micro_batch_size=batch_size,
        )
    else:
        collate = PaddedCollator(data.store, saved.task.rows.labels, saved.tokenizer.pad_token_id or 0)
    model = saved.load(plan.device, torch.bfloat16 if plan.precision == "bf16-pure" else torch.float32)
    forward, _ = make_eager_forward(model, saved.task.head, replace(plan, fused_loss=cfg.loss_fn.fused is not False))
    return Evaluator(
        model=model,
        forward=forward,
        loss=saved.task.loss(cfg.loss_fn, saved.problem_type, data.num_labels),
        loader=EvalLoader(collate, lengths=data.store.lengths, batch_size=batch_size),
        kind=saved.task.metrics(saved.problem_type),
        label_names=data.label_names,
        compute=lambda: autocast(precision_around(plan), plan.device),
        device=plan.device,
    )
