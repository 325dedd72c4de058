"""The data of a run: task, tokenizer, tokenised training and validation data. No weights, no plan.

`prepare_run` builds the plan on top of this, and `automodel data preview` shows it. What is wrong with the training
data and what is wrong with the validation data is said together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from automodel.config.errors import UserError
from automodel.config.gate import REMOTE_DATA, resolve_target
from automodel.data.config import DatasetConfig
from automodel.data.inheritance import inherit, members_of
from automodel.data.keys import check_keys
from automodel.data.prepare import PreparedData, cache_root, prepare
from automodel.data.problems import Problems
from automodel.data.saved_tokenizer import as_training_read
from automodel.data.sources import find_source
from automodel.engine.classes import check_names, known_classes
from automodel.engine.ends import check_ends
from automodel.engine.known_tokens import check_tokens
from automodel.engine.same_kind import check_kind
from automodel.models.adapted import refuse_adapter
from automodel.models.few_bits import refuse_few_bits
from automodel.models.languages import name_languages
from automodel.models.load import load_tokenizer, model_limits, read_hf_config
from automodel.models.source import find_tokenizer
from automodel.plan.config import RunConfig
from automodel.tasks.infer import infer_task, load_config
from automodel.tasks.registry import ROW_FORMATS, TASKS, task_named
from automodel.tasks.task import Task


@dataclass(frozen=True)
class RunData:
    """What a run learns from."""

    task: Task
    hf_config: Any
    """The model's config, before the data's classes are known."""
    tokenizer: Any
    train: PreparedData
    validation: PreparedData | None

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(int(part.store.lengths.max()) for part in (self.train, self.validation) if part is not None)


def read_data(cfg: RunConfig, trust: Sequence[str] = ()) -> RunData:
    """Tokenised data of a run. Raises `UserError` with everything that is wrong with either part of it."""
    task, hf_config, tokenizer = _model_side(cfg, trust)
    name_languages(tokenizer, cfg.dataset, cfg.validation_dataset)
    restore = truncation_of(tokenizer)
    limits = model_limits(hf_config, task.head)
    known = known_classes(cfg.model, hf_config, task)

    def load(
        section: DatasetConfig,
        role: Literal["train", "validation"],
        written: DatasetConfig,
        like: PreparedData | None = None,
    ) -> PreparedData:
        return prepare(
            section,
            row_format=task.rows,
            tokenizer=tokenizer,
            max_positions=limits.max_positions,
            type_vocab_size=limits.type_vocab_size,
            role=role,
            like=like,
            num_labels=cfg.model.num_labels,
            problem_type=cfg.model.problem_type,
            known_labels=known,
            resolved_target=custom_target(section, trust),
            remote=REMOTE_DATA in trust,
            written=written,
        )

    problems = Problems()
    train = validation = None
    for where, section in (("dataset", cfg.dataset), ("validation_dataset", cfg.validation_dataset)):
        with problems.collecting():
            check_keys(task.rows, ROW_FORMATS, section, where, custom_target(section, trust) if section else None)
    with problems.collecting():
        train = load(cfg.dataset, "train", cfg.dataset)
        check_names(cfg.model, known, train)
        check_ends(train, hf_config, "dataset")
        check_tokens(train.store, tokenizer, hf_config, "dataset")
    # Without the training data's classes, a classifier's validation data cannot be judged.
    if cfg.validation_dataset is not None and (train is not None or not task.head.has_classes):
        with problems.collecting():
            section = inherit(cfg.dataset, cfg.validation_dataset)
            validation = load(section, "validation", cfg.validation_dataset, train)
            check_kind(cfg.dataset, train.layout if train else None, validation, section)
            check_ends(validation, hf_config, "validation_dataset")
            check_tokens(validation.store, tokenizer, hf_config, "validation_dataset")
    problems.raise_if_any()
    assert train is not None
    restore()
    segments = train.store.token_types is not None
    tokenizer = as_training_read(
        tokenizer, task.rows, cfg.dataset, limits.max_positions, segments=segments, longest=train.max_length
    )
    return RunData(task, hf_config, tokenizer, train, validation)


def truncation_of(tokenizer: Any) -> Callable[[], None]:
    """Puts back how a fast tokenizer cuts by itself. Whoever calls one with a limit leaves it there; it would be saved
    with the model, and programs that read `tokenizer.json` alone would cut by it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "no_truncation"):
        return lambda: None
    before = backend.truncation
    return backend.no_truncation if before is None else lambda: backend.enable_truncation(**before)


def custom_target(section: DatasetConfig, trust: Sequence[str]) -> Any:
    """The object behind a dataset's own `_target_`; None where it names the built-in loading."""
    if section.target is None:
        return None
    return resolve_target(section.target, "dataset", section.extra, trust)


def _model_side(cfg: RunConfig, trust: Sequence[str]) -> tuple[Task, Any, Any]:
    """Task, config and tokenizer of the model. Where they cannot be had, nothing can be tokenised; but whether the data
    are there is looked up, and said together."""
    problems = Problems("the model and the data")
    with problems.collecting():
        task, hf_config = _task(cfg)
        return task, hf_config, load_tokenizer(cfg.model, hf_config)
    if cfg.model.tokenizer is not None:
        with problems.collecting():
            find_tokenizer(cfg.model)
    sections = [("dataset", cfg.dataset)]
    if (held_out := cfg.validation_dataset) is not None and (held_out.path or held_out.target or held_out.mixture):
        sections.append(("validation_dataset", inherit(cfg.dataset, held_out)))
    for where, section in sections:
        with problems.collecting():
            target = custom_target(section, trust)
            for place, part in members_of(section, where):
                with problems.collecting():
                    role = "train" if where == "dataset" else "validation"
                    given: Any = {"resolved_target": target, "memory": cache_root(part), "remote": REMOTE_DATA in trust}
                    find_source(part, role=role, section=place, **given).check()
    problems.raise_if_any()
    raise AssertionError("a model without a problem was not read")


def _task(cfg: RunConfig) -> tuple[Task, Any]:
    refuse_adapter(cfg.model.pretrained_model_name_or_path)
    task = task_named(cfg.task) if cfg.task else infer_task(cfg.model, cfg.dataset.target, None)
    if task is None:
        # Only the model's own config can still tell; it is small and is needed anyway.
        task = infer_task(cfg.model, cfg.dataset.target, read_hf_config(cfg.model))
    if task is None:
        raise UserError(
            "task: it cannot be told from the model or the dataset what to train. Add one line to the config:\n"
            f"  task: {TASKS[0]}   (or {', '.join(map(str, TASKS[1:]))})"
        )
    hf_config = load_config(cfg.model, task, cfg.model.num_labels, None, cfg.model.problem_type)
    refuse_few_bits(cfg.model.pretrained_model_name_or_path, hf_config)
    return task, hf_config
