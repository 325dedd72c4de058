"""The classes of a run, between a checkpoint that may know them already and the data that has them.

A head that was trained has an order of classes, and `model.id2label` may name one: the data's names follow it where
they are the same. Where a trained head cannot go on (other numbers of classes), goes on under other names, or where a
class has no rows, the plan says so: none of it shows in the losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from automodel.config.errors import UserError
from automodel.data.label_kinds import is_whole_number
from automodel.data.prepare import PreparedData
from automodel.models.config import ModelConfig
from automodel.models.load import read_hf_config
from automodel.tasks.infer import infer_task
from automodel.tasks.task import Task

SHOWN = 6


def known_classes(cfg: ModelConfig, hf_config: Any, task: Task) -> tuple[str, ...] | None:
    """Names of the classes in the order of `model.id2label` or, without it, of the checkpoint's trained head."""
    if not task.head.has_classes or not ("id2label" in cfg.extra or _has_head(hf_config, task)):
        return None
    return _names(hf_config)


def check_names(cfg: ModelConfig, known: Sequence[str] | None, train: PreparedData) -> None:
    """Refuses names under `model:` that are not the data's: one of the two would have to be dropped."""
    if "id2label" not in cfg.extra or known is None:
        return
    found = train.label_names
    if found and _lower(known) != _lower(found):
        raise UserError(
            f"model.id2label names the classes {_few(known)}, but those of the data are {_few(found)}. Make them the "
            "same, or remove model.id2label: the data's names are saved with the model."
        )
    if not found and train.num_labels != len(known):
        raise UserError(
            f"model.id2label names {len(known)} classes, but the data has {train.num_labels}, numbered from 0. If the "
            f"others only do not occur in it, set model.num_labels to {len(known)}."
        )


def class_notes(cfg: ModelConfig, hf_config: Any, task: Task, train: PreparedData) -> Iterator[str]:
    """What a person should know about the head and its classes. `hf_config`: before the data's classes were known."""
    if train.num_labels is None:
        return
    counts = train.stats.label_counts or ()
    missing = [i for i, count in enumerate(counts) if not count]
    if missing and len(missing) < len(counts) - 1:  # one class alone has a note of its own
        names = [train.label_names[i] if train.label_names else str(i) for i in missing]
        yield f"no row has the label {_few(names)}: the model learns never to answer with it"
    same: dict[str, list[str]] = {}
    for name in train.label_names or ():
        same.setdefault(name.strip().lower(), []).append(f"'{name}'")
    if alike := [" and ".join(names) for names in same.values() if len(names) > 1]:
        yield f"the classes {_few(alike)} differ only in spaces or upper and lower case, and are learned as two"
    if not _has_head(hf_config, task) or (cfg.target or "").endswith(".from_config"):
        return
    asked = cfg.num_labels is not None or "id2label" in cfg.extra  # then hf_config has them instead of its own
    stock = read_hf_config(cfg) if asked else hf_config
    names, found = _names(stock), train.label_names
    before, now = stock.problem_type, train.problem_type
    if stock.num_labels != train.num_labels:
        count = f"{stock.num_labels} class{'' if stock.num_labels == 1 else 'es'}"
        yield (
            f"the checkpoint's head has {count}{f' ({_few(names)})' if names else ''} and the data "
            f"{train.num_labels}: the head starts anew, with random weights"
        )
    elif names and found and [name.lower() for name in names] != [name.lower() for name in found]:
        yield f"the checkpoint's head goes on, but its classes {_few(names)} are now called {_few(found)}"
    elif names and not found and not asked and not any(map(is_whole_number, names)):
        yield f"labels are numbers, read as classes of the checkpoint's head by their place: {_numbered(names)}"
    elif before and now and before != now:
        yield f"the checkpoint's head goes on, but was trained for {before} and not for {now}"


def _numbered(names: Sequence[str]) -> str:
    return _few([f"{number} = {name}" for number, name in enumerate(names)])


def _has_head(hf_config: Any, task: Task) -> bool:
    return infer_task(ModelConfig(pretrained_model_name_or_path=""), None, hf_config) == task


def _names(hf_config: Any) -> tuple[str, ...] | None:
    """None where nobody gave the classes names."""
    names = tuple(str(hf_config.id2label[i]) for i in range(hf_config.num_labels))
    return None if names == tuple(f"LABEL_{i}" for i in range(len(names))) else names


def _lower(names: Sequence[str]) -> list[str]:
    return sorted(name.lower() for name in names)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
