"""Which task a run means when it does not say, and whether a model can do it.

The answers come from names: of the `_target_` class, of the dataset class, of the architecture in the model's config,
and from transformers' own tables of which model type has a class with which head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from automodel.config.errors import UserError
from automodel.models.auto_class import heads_of
from automodel.models.config import ModelConfig
from automodel.tasks.registry import TASKS
from automodel.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def infer_task(cfg: ModelConfig, dataset_target: str | None, hf_config: PreTrainedConfig | None) -> Task | None:
    """The task that the model's `_target_` names, else the dataset's, else the architecture in the model's config; None
    where none of them says."""
    architecture = (getattr(hf_config, "architectures", None) or [None])[0]
    return _of_model_class(cfg.target) or _of_dataset_class(dataset_target) or _of_model_class(architecture)


def _of_model_class(name: str | None) -> Task | None:
    return next((task for task in TASKS if _has_part(name, task.model_classes)), None)


def _of_dataset_class(name: str | None) -> Task | None:
    return next((task for task in TASKS if _has_part(name, task.dataset_classes)), None)


def _has_part(name: str | None, parts: Sequence[str]) -> bool:
    return name is not None and any(part.lower() in name.lower() for part in parts)


def tasks_of(hf_config: PreTrainedConfig) -> tuple[Task, ...]:
    """The tasks a model of this config can be fine-tuned for."""
    heads = heads_of(hf_config)
    return tuple(task for task in TASKS if task.head in heads)


def require_task(hf_config: PreTrainedConfig, task: Task, name: str) -> None:
    """Refuses a task the model cannot do, naming the tasks it can."""
    can = tasks_of(hf_config)
    if task in can:
        return
    if not can:
        home = "its own code" if getattr(hf_config, "auto_map", None) else "transformers"
        raise UserError(
            f"task: {name!r} is a {hf_config.model_type} model, which {home} has no class for in any of "
            f"{', '.join(map(str, TASKS))}; choose another model"
        )
    raise UserError(
        f"task: {name!r} is a {hf_config.model_type} model, which cannot do {task}; it can do "
        f"{', '.join(map(str, can))}. Change `task` (or the `_target_` of the model), or choose another model."
    )


def load_config(
    cfg: ModelConfig,
    task: Task,
    num_labels: int | None = None,
    label_names: Sequence[str] | None = None,
    problem_type: str | None = None,
) -> PreTrainedConfig:
    """The config of a model that can do the task, with the run's labels in it. Raises `UserError` for keys of `model:`
    that mean nothing for the task, and for a model that cannot do it."""
    from automodel.models.load import load_hf_config

    if cfg.problem_type is not None and task.head.wants != "pooled":
        raise UserError(f"model.problem_type: {cfg.problem_type} means nothing for {task}; remove it")
    if cfg.num_labels is not None and not task.head.has_classes:
        raise UserError(f"model.num_labels: {cfg.num_labels} means nothing for {task}; remove it")
    hf_config = load_hf_config(cfg, task.head, num_labels, label_names, problem_type)
    require_task(hf_config, task, cfg.pretrained_model_name_or_path)
    return hf_config
