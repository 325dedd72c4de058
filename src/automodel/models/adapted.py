"""A base model and the adapter that belongs to it.

A run with `peft:` saves an adapter folder: the adapter, the config with its class names, the tokenizer. The base stays
where it was, and `adapter_config.json` says where: an absolute folder, or a name on the hub with its revision. Folders
that PEFT itself wrote have neither config nor labels; those are then read from the base and from the head's size.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from automodel.adapters.attach import Adapter, attach, resolve
from automodel.adapters.config import PeftConfig
from automodel.adapters.kept import resolve_kept
from automodel.adapters.peft_folder import (
    TASK_TYPES,
    is_adapter_folder,
    read_config,
    read_tensors,
    resolve_folder,
    resolve_start,
)
from automodel.config.errors import UserError
from automodel.models.config import ModelConfig
from automodel.models.load import load_hf_config, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

HEADS = ("classifier.weight", "score.weight", "classifier.out_proj.weight")  # their rows are classes


def adapter_for_run(
    section: PeftConfig, model: ModelConfig, skeleton: Any, task: str, kept: dict[str, Any] | None = None
) -> Adapter:
    """The adapter that a run trains. `skeleton`: the model on torch's meta device. `kept`: what the run that goes on
    has noted of it (`adapters/kept.py`), which then holds, whatever became of the folder that it started from."""
    name = model.pretrained_model_name_or_path
    if (model.target or "").endswith(".from_config"):
        raise UserError(
            "peft: an adapter is saved without its base, and random weights (from_config) lie nowhere to be found "
            "again. Use `from_pretrained`, or remove the section."
        )
    refuse_adapter(name)
    folder = os.path.expanduser(name)
    base = os.path.abspath(folder) if os.path.isdir(folder) else name
    if kept is not None:
        return resolve_kept(kept, skeleton, task, base, model.revision)
    choose = resolve if section.pretrained_adapter is None else resolve_start
    return choose(section, skeleton, task, base, model.revision)


def refuse_adapter(name: str) -> None:
    """An adapter is no model to train."""
    if is_adapter_folder(name):
        raise UserError(
            f"model: '{name}' holds an adapter. Name its base there ({base_of(name)}), and the adapter under "
            f"peft.pretrained_adapter; or make one model of both: "
            f"automodel export {shlex.quote(name)} --merge -o FOLDER."
        )


def base_of(folder: str | Path) -> str:
    base = read_config(folder).get("base_model_name_or_path")
    if not base:
        raise UserError(
            f"'{folder}/adapter_config.json' does not say which model the adapter belongs to. Write it there, as "
            "base_model_name_or_path."
        )
    return str(base)


def base_source(adapter: ModelConfig) -> ModelConfig:
    """The base of an adapter folder as a `model:` section."""
    folder = adapter.pretrained_model_name_or_path
    base = base_of(folder)
    if os.path.isabs(base) and not os.path.isdir(base):
        raise UserError(
            f"the adapter in '{folder}' belongs to the model in '{base}', which is not there any more. Put it back, or "
            "write its new place into adapter_config.json (base_model_name_or_path)."
        )
    revision = read_config(folder).get("revision")
    return replace(adapter, pretrained_model_name_or_path=base, revision=revision, tokenizer=None)


def load_adapted(
    source: ModelConfig, hf_config: PreTrainedConfig, task: str, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    """Base and adapter of an adapter folder, frozen or not as in training."""
    model: Any = load_model(base_source(source), hf_config, task, dtype=dtype, device=device)
    folder = source.pretrained_model_name_or_path
    if getattr(model, "is_quantized", False):
        raise UserError(
            f"the adapter in '{folder}' belongs to '{base_of(folder)}', whose weights are in few bits. Write the model "
            "that those were made from into adapter_config.json (base_model_name_or_path)."
        )
    adapter = resolve_folder(folder, model, task, base_of(folder))
    random = sorted(model.newly_initialised - set(adapter.start or ()))
    if random:
        raise UserError(
            f"'{random[0]}' is neither in the adapter '{folder}' nor in its base '{adapter.base}': answers would "
            "be random. Save the adapter with that module among modules_to_save."
        )
    attach(model, adapter)
    return model


def tokenizer_of(source: ModelConfig) -> ModelConfig:
    """Where the tokenizer of a foreign adapter folder is: in it, or with its base."""
    folder = Path(source.pretrained_model_name_or_path)
    own = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))
    return source if own else base_source(source)


def foreign_config(source: ModelConfig) -> tuple[str, PreTrainedConfig]:
    """Task and config of an adapter folder that has no `config.json`: the base's, with what `source.extra` changes."""
    folder = source.pretrained_model_name_or_path
    kind = read_config(folder).get("task_type")
    task = next((task for task, name in TASK_TYPES.items() if name == kind), None)
    if task is None:
        raise UserError(
            f"'{folder}/adapter_config.json' has the task_type {kind}, which tells no task. Write one of "
            f"{', '.join(TASK_TYPES.values())} there."
        )
    labels = None
    if task.endswith("classification"):
        tensors = read_tensors(folder)
        labels = next((tensors[head].shape[0] for head in HEADS if head in tensors), None)
    return task, load_hf_config(base_source(source), task, labels)
