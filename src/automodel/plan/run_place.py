"""Where a run may write: not into what it reads.

A run folder or a token cache inside a folder of data adds files that are data the next time: every readable file below
the folder is read. A run folder that is the dataset, or the model, replaces it; one that has the name of a model on the
hub would be taken for that model the next time. (Datasets are told from run folders by what is in them.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from automodel.config.errors import UserError
from automodel.config.run_folders import could_be_on_hub
from automodel.data.config import BUILDERS, DatasetConfig
from automodel.data.hub_names import names_the_hub
from automodel.plan.config import RunConfig

SAVED = ("dataset_dict.json", "state.json")
"""Files that tell a folder of `save_to_disk`, of which only the files are read that these name."""


def check_run_place(cfg: RunConfig) -> None:
    """Raises `UserError` where a run would write into what it reads. What lies on the hub has no place here."""
    for key, folder in _written(cfg):
        place = place_of(folder)
        if key == "checkpoint.checkpoint_dir" and place.exists() and not place.is_dir():
            raise UserError(f"{key}: {folder} is a file. Name a folder.")
        for source, path, all_below in read_by(cfg):
            other = place_of(path)
            if not other.exists():
                if _hides(key, place, source, path):
                    raise UserError(
                        f"{key}: '{folder}' makes a folder '{path}', which would be taken for the '{path}' of the hub "
                        f"({source}) from then on. {_choose(key)}"
                    )
                continue
            if place == other:
                raise UserError(f"{key}: '{folder}' is also {source}, which the run reads. {_choose(key)}")
            if all_below and other in place.parents:
                raise UserError(
                    f"{key}: '{folder}' lies in '{path}', every file of which is data ({source}): the next start would "
                    f"read what this run writes. {_choose(key)} Or choose files with {source.split('.')[0]}.data_files."
                )


def _hides(key: str, place: Path, source: str, path: str) -> bool:
    """Whether a folder that is written to would stand in the way of a name on the hub."""
    of_data = source.endswith(".path") and key == "checkpoint.checkpoint_dir"
    if of_data or source.endswith("chat_template") or not could_be_on_hub(path):
        return False
    return place_of(path) in (place, *place.parents)


def _choose(key: str) -> str:
    return f"Choose another folder: {key}=./another."


def place_of(path: str) -> Path:
    return Path(os.path.realpath(os.path.expanduser(path)))  # `Path.resolve` fails at links that lead in a circle


def _written(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys of folders that are written to, and their values."""
    yield "checkpoint.checkpoint_dir", cfg.checkpoint.checkpoint_dir
    for section, name in ((cfg.dataset, "dataset"), (cfg.validation_dataset, "validation_dataset")):
        if section is not None and section.cache_dir:
            yield f"{name}.cache_dir", section.cache_dir
    if cfg.tensorboard is not None and cfg.tensorboard.log_dir:
        yield "tensorboard.log_dir", cfg.tensorboard.log_dir
    if cfg.wandb is not None and cfg.wandb.dir:
        yield "wandb.dir", cfg.wandb.dir


def read_by(cfg: RunConfig) -> Iterator[tuple[str, str, bool]]:
    """Keys of what is read, their values, and whether every file below is."""
    yield "model.pretrained_model_name_or_path", cfg.model.pretrained_model_name_or_path, False
    if cfg.model.tokenizer:
        yield "model.tokenizer", cfg.model.tokenizer, False
    if cfg.peft is not None and cfg.peft.pretrained_adapter:
        yield "peft.pretrained_adapter", cfg.peft.pretrained_adapter, False
    for section, name in ((cfg.dataset, "dataset"), (cfg.validation_dataset, "validation_dataset")):
        if section is None:
            continue
        by_format = section.path in BUILDERS and section.data_files
        if section.path and not by_format and not names_the_hub(section.path):
            yield f"{name}.path", section.path, _reads_all(section.path, section)
        if section.chat_template:
            yield f"{name}.chat_template", section.chat_template, False
        for number, entry in enumerate(section.mixture or ()):
            if names_the_hub(entry.path):
                continue
            yield f"{name}.mixture.{number}.path", entry.path, _reads_all(entry.path, entry)


def _reads_all(path: str, section: DatasetConfig | object) -> bool:
    """Whether every readable file below a folder is data."""
    folder = place_of(path)
    saved = any((folder / name).is_file() for name in SAVED)
    return folder.is_dir() and not saved and not getattr(section, "data_files", None)
