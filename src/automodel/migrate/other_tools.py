"""Axolotl's and LLaMA-Factory's YAML, as far as their common keys go.

Both wrap HF Trainer, so most of their keys are its own (`training_arguments.py`); the tables here are the rest. A key
that is in no table is listed as not carried over; one that would make another training of it (another stage than
supervised tuning, templates of their own) stands in the way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.migrate.document import Document
from automodel.migrate.training_arguments import carry_over

AXOLOTL_NAMES = {
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "group_by_length": "group_by_length",
    "wandb_name": "run_name",
    "wandb_run_id": "run_name",
}
AXOLOTL_IGNORED = (
    "is_llama_derived_model", "strict", "special_tokens", "tokens", "flash_attention", "sdp_attention",
    "xformers_attention", "dataset_prepared_path", "pad_to_sequence_len", "wandb_entity", "wandb_watch",
    "wandb_log_model", "local_rank", "model_type", "tokenizer_type", "debug", "saves_per_epoch", "evals_per_epoch",
    "eval_table_size", "shuffle_merged_datasets", "gradient_checkpointing_kwargs", "adapter", "eval_sample_packing",
    "sample_packing", "train_on_inputs", "eval_max_new_tokens", "resume_from_checkpoint",
    "auto_resume_from_checkpoints",
)  # fmt: skip
FACTORY_IGNORED = (
    "do_train", "template", "plot_loss", "overwrite_cache", "preprocessing_num_workers", "dataloader_num_workers",
    "stage", "finetuning_type", "dataset_dir", "trust_remote_code", "flash_attn", "report_to", "ddp_timeout",
    "resize_vocab", "resume_from_checkpoint", "include_num_input_tokens_seen", "optim_args", "packing",
    "neat_packing", "train_on_prompt",
)  # fmt: skip


def read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {error}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a list of settings.")
    return found


def migrate_yaml(path: Path) -> Document:
    """The file as a document; raises `UserError` where it is neither of the two."""
    found = read_yaml(path)
    if "base_model" in found:
        return _axolotl(found, path)
    if "model_name_or_path" in found and ("stage" in found or "finetuning_type" in found):
        return _llama_factory(found, path)
    raise UserError(
        f"{path} is not recognised: Axolotl's files have `base_model`, LLaMA-Factory's `model_name_or_path` and "
        "`stage`. "
        "A config of this library needs no migration: `automodel config validate -c` checks it."
    )


def _axolotl(found: dict[str, Any], path: Path) -> Document:
    document = Document(path.name)
    rest = dict(found)
    document.set("model.pretrained_model_name_or_path", rest.pop("base_model"), "base_model")
    document.set("task", "causal-lm")
    if rest.pop("rl", None):
        document.block(0, "rl: preference tuning is not part of this trainer")
    _axolotl_data(rest, document)
    adapter = found.get("adapter")
    if adapter in ("lora", "qlora"):
        _lora(rest, document, linear=bool(rest.pop("lora_target_linear", False)))
    elif adapter:
        document.block(0, f"adapter: {adapter} is not LoRA")
    for key in ("load_in_4bit", "load_in_8bit"):
        if rest.pop(key, False):
            document.set(f"quantization.{key}", True, key)
    if rest.pop("wandb_project", None):
        document.set("wandb.project", found["wandb_project"], "wandb_project")
    if rest.get("bf16") == "auto":
        rest["bf16"] = True
    if "early_stopping_patience" in rest:
        document.set("early_stopping.patience", rest.pop("early_stopping_patience"), "early_stopping_patience")
    for key in ("evals_per_epoch", "saves_per_epoch"):
        if found.get(key) not in (None, 0, 1):
            document.note(0, f"{key}: {found[key]}: once an epoch here, or set step_scheduler.val_every_steps")
    if rest.get("eval_steps"):
        rest["eval_strategy"] = "steps"
    arguments = {AXOLOTL_NAMES.get(k, k): v for k, v in rest.items() if k not in AXOLOTL_IGNORED and v is not None}
    carry_over(arguments, document)
    return document


def _axolotl_data(rest: dict[str, Any], document: Document) -> None:
    datasets = rest.pop("datasets", None) or []
    if len(datasets) != 1:
        document.block(0, f"datasets: there are {len(datasets)}; write them as dataset.mixture")
    for entry in datasets[:1]:
        document.set("dataset.path", entry.get("path"), "datasets")
        kind = entry.get("type", "")
        if kind not in ("alpaca", "chat_template", "sharegpt", "completion"):
            document.block(0, f"datasets.type: {kind!r} is a format of Axolotl's own; ours are in docs/data.md")
        for key, target in (("split", "split"), ("name", "name"), ("data_files", "data_files")):
            if entry.get(key):
                document.set(f"dataset.{target}", entry[key], f"datasets.{key}")
        if entry.get("field_messages"):
            document.set("dataset.messages_column", entry["field_messages"], "field_messages")
    length = rest.pop("sequence_len", None)
    if length is not None:
        document.set("dataset.max_length", length, "sequence_len")
    _held_out(rest.pop("val_set_size", None), document, "val_set_size")
    if rest.get("train_on_inputs"):
        document.set("dataset.answer_only_loss", False, "train_on_inputs")
    document.note(0, "sample_packing: documents are always packed here, and never see each other")


def _held_out(size: Any, document: Document, key: str) -> None:
    """A share of the rows, kept for evaluation."""
    if not size:
        return
    percent = round(100 * (1 - float(size))) if float(size) < 1 else None
    if percent is None or not 0 < percent < 100:
        document.block(0, f"{key}: {size} is not a share between 0 and 1; split the file")
        return
    base = document.get("dataset.split") or "train"
    document.set("dataset.split", f"{base}[:{percent}%]", key)
    document.set("validation_dataset.split", f"{base}[{percent}%:]", key)
    document.note(0, f"{key}: the last rows are held out, not a random draw")


def _lora(rest: dict[str, Any], document: Document, linear: bool) -> None:
    document.set("peft.dim", rest.pop("lora_r", rest.pop("lora_rank", 8)), "rank")
    alpha = rest.pop("lora_alpha", None)
    document.set("peft.alpha", alpha if alpha is not None else 2 * document.get("peft.dim"), "lora_alpha")
    dropout = rest.pop("lora_dropout", None)
    if dropout:
        document.set("peft.dropout", dropout, "lora_dropout")
    targets = rest.pop("lora_target_modules", None)
    if linear or targets is None:
        document.set("peft.target_modules", "all-linear", "lora_target_linear" if linear else "")
    else:
        document.set("peft.target_modules", targets, "lora_target_modules")
    for key in ("lora_model_dir", "lora_modules_to_save"):
        value = rest.pop(key, None)
        if value:
            target = "pretrained_adapter" if key == "lora_model_dir" else "modules_to_save"
            document.set(f"peft.{target}", value, key)


def _llama_factory(found: dict[str, Any], path: Path) -> Document:
    document = Document(path.name)
    rest = dict(found)
    document.set("model.pretrained_model_name_or_path", rest.pop("model_name_or_path"), "model_name_or_path")
    document.set("task", "causal-lm")
    if found.get("stage", "sft") != "sft":
        document.block(0, f"stage: {found['stage']} is not supervised tuning")
    _factory_data(rest, document, path)
    kind = found.get("finetuning_type", "lora")
    if kind == "lora":
        target = rest.pop("lora_target", "all")
        if target not in ("all", None):
            names = [name.strip() for name in target.split(",")] if isinstance(target, str) else target
            rest["lora_target_modules"] = names
        _lora(rest, document, linear=False)
    elif kind != "full":
        document.block(0, f"finetuning_type: {kind} is neither lora nor full")
    bits = rest.pop("quantization_bit", None)
    if bits in (4, 8):
        document.set(f"quantization.load_in_{bits}bit", True, "quantization_bit")
    elif bits:
        document.block(0, f"quantization_bit: {bits} is neither 4 nor 8")
    if rest.pop("enable_liger_kernel", None) is not None:
        document.note(0, "enable_liger_kernel: kernels of our own are used wherever they are faster")
    rest.pop("lora_target", None)
    carry_over({k: v for k, v in rest.items() if k not in FACTORY_IGNORED and v is not None}, document)
    return document


def _factory_data(rest: dict[str, Any], document: Document, path: Path) -> None:
    names = rest.pop("dataset", None)
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names or [])
    if len(names) != 1:
        document.block(0, f"dataset: there are {len(names)}; write them as dataset.mixture")
    for name in names[:1]:
        document.set("dataset.path", _registered(name, rest, path), f"dataset {name}")
    length = rest.pop("cutoff_len", None)
    if length is not None:
        document.set("dataset.max_length", length, "cutoff_len")
    if rest.get("max_samples"):
        document.set("dataset.num_samples_limit", rest.pop("max_samples"), "max_samples")
    eval_dataset = rest.pop("eval_dataset", None)
    if eval_dataset:
        document.set("validation_dataset.path", _registered(eval_dataset, rest, path), "eval_dataset")
    _held_out(rest.pop("val_size", None), document, "val_size")
    document.note(0, "template: the tokenizer's own chat template is used")


def _registered(name: str, rest: dict[str, Any], path: Path) -> str:
    """The file or hub name that LLaMA-Factory's `dataset_info.json` has for a dataset; the name itself without it."""
    for folder in (Path(rest.get("dataset_dir") or "data"), path.parent / "data", path.parent):
        try:
            entry = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8")).get(name)
        except (OSError, ValueError):
            continue
        if isinstance(entry, dict):
            if entry.get("file_name"):
                return str(folder / entry["file_name"])
            if entry.get("hf_hub_url"):
                return str(entry["hf_hub_url"])
    return name
