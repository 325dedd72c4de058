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
    is_adapter_folder,
    read_config,
    read_tensors,
    resolve_folder,
    resolve_start,
)
from automodel.config.errors import UserError
from automodel.models.config import ModelConfig
from automodel.models.load import load_model
from automodel.models.task_head import HEADS, TaskHead

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

HEAD_WEIGHTS = ("classifier.weight", "score.weight", "classifier.out_proj.weight")  # their rows are classes


def adapter_for_run(
    section: PeftConfig, model: ModelConfig, skeleton: Any, head: TaskHead, kept: dict[str, Any] | None = None
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
        return resolve_kept(kept, skeleton, head.adapter_type, base, model.revision)
    choose = resolve if section.pretrained_adapter is None else resolve_start
    return choose(section, skeleton, head.adapter_type, base, model.revision)


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
    source: ModelConfig, hf_config: PreTrainedConfig, head: TaskHead, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    """Base and adapter of an adapter folder, frozen or not as in training."""
    model: Any = load_model(base_source(source), hf_config, head, dtype=dtype, device=device)
    folder = source.pretrained_model_name_or_path
    if getattr(model, "is_quantized", False):
        raise UserError(
            f"the adapter in '{folder}' belongs to '{base_of(folder)}', whose weights are in few bits. Write the model "
            "that those were made from into adapter_config.json (base_model_name_or_path)."
        )
    adapter = resolve_folder(folder, model, head.adapter_type, base_of(folder))
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


def head_of_folder(source: ModelConfig) -> TaskHead:
    """The head that an adapter folder says it belongs under."""
    folder = source.pretrained_model_name_or_path
    kind = read_config(folder).get("task_type")
    head = next((head for head in HEADS if head.adapter_type == kind), None)
    if head is None:
        raise UserError(
            f"'{folder}/adapter_config.json' has the task_type {kind}, which tells no task. Write one of "
            f"{', '.join(head.adapter_type for head in HEADS)} there."
        )
    return head


def classes_of_folder(source: ModelConfig, head: TaskHead) -> int | None:
    """How many classes the head in an adapter folder scores; None where there is no such head in it."""
    if not head.has_classes:
        return None
    tensors = read_tensors(source.pretrained_model_name_or_path)
    return next((tensors[name].shape[0] for name in HEAD_WEIGHTS if name in tensors), None)
