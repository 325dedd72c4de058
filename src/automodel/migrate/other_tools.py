"""Axolotl's and LLaMA-Factory's YAML, as far as their common keys go; NeMo AutoModel's is in `nemo.py`.

Both wrap HF Trainer, so most of their keys are its own (`training_arguments.py`); the tables here are the rest. A key
that changes no training (trackers, kernels, memory) is left out; one that would make another training of it (another
stage than supervised tuning, templates of their own), and one that nobody here knows, stands in the way, with its line.
So does a key that Axolotl's versions have different defaults for, where it is missing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.config.foreign import AXOLOTL, tool_of
from automodel.config.json_text import parse_json
from automodel.config.yaml_text import parse_yaml
from automodel.migrate.document import Document, lines_of
from automodel.migrate.nemo import is_nemo, migrate_nemo
from automodel.migrate.training_arguments import KNOWN, carry_over
from automodel.tasks.registry import CAUSAL_LM

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
    "strict", "flash_attention", "sdp_attention", "xformers_attention", "pad_to_sequence_len",
    "local_rank", "model_type", "tokenizer_type", "debug", "saves_per_epoch", "adapter", "evals_per_epoch",
    "eval_table_size", "eval_table_max_new_tokens", "shuffle_merged_datasets", "sample_packing",
    "eval_sample_packing", "gradient_checkpointing_kwargs", "train_on_inputs", "eval_max_new_tokens",
    "low_cpu_mem_usage", "resume_from_checkpoint", "auto_resume_from_checkpoints", "special_tokens",
    "chat_template", "gpu_memory_limit", "device_map", "max_memory", "hf_use_auth_token", "trust_remote_code",
    "lora_fan_in_fan_out", "val_set_size", "save_first_step", "unsloth_cross_entropy_loss", "cut_cross_entropy",
    "mean_resizing",
)  # fmt: skip
AXOLOTL_REQUIRED = ("micro_batch_size", "learning_rate", "lr_scheduler", "sequence_len")
FACTORY_IGNORED = (
    "do_train", "template", "plot_loss", "overwrite_cache", "preprocessing_num_workers", "dataloader_num_workers",
    "stage", "finetuning_type", "dataset_dir", "trust_remote_code", "flash_attn", "report_to", "ddp_timeout",
    "resume_from_checkpoint", "include_num_input_tokens_seen", "packing", "neat_packing", "train_on_prompt",
    "logging_dir", "use_fast_tokenizer", "cache_dir", "low_cpu_mem_usage", "use_unsloth", "lora_target",
    "tokenized_path", "upcast_layernorm", "disable_gradient_checkpointing", "include_effective_tokens_per_second",
    "use_unsloth_gc",
)  # fmt: skip
SAME_TRAINING = (
    "wandb_", "mlflow_", "comet_", "swanlab_", "hub_", "dataset_", "loss_watchdog_", "flash_attn_", "liger_", "is_",
    "use_wandb", "use_swanlab", "ray_", "gc_steps", "image_", "video_", "lora_mlp_kernel", "lora_qkv_kernel",
    "lora_o_kernel",
)  # fmt: skip
"""How keys begin that change no training."""
INFO = "dataset_info.json"
FACTORY_TAGS = {
    "role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool"), "system_tag": ("system",),
    "function_tag": ("function_call",),
}  # fmt: skip
"""How the turns of a chat are marked in files that are read here as they are."""
OF_ADAPTERS = {
    "use_dora": "use_dora", "peft_use_dora": "use_dora", "use_rslora": "use_rslora", "peft_use_rslora": "use_rslora",
    "loraplus_lr_ratio": "loraplus_lr_ratio", "adapter_name_or_path": "pretrained_adapter",
    "lora_model_dir": "pretrained_adapter", "lora_modules_to_save": "modules_to_save",
    "additional_target": "modules_to_save",
}  # fmt: skip


TRAINERS_DEFAULTS = {
    "checkpoint.keep_best": ("load_best_model_at_end",),
    "training_optimizations.precision": ("bf16", "fp16"),
}
"""What is written for a whole file that does not say it, and the keys that would."""


def read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """With `2e-5` as the number that everybody means; in YAML 1.1 it is text, for want of a point."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
    try:
        found = parse_yaml(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}.") from error
    if found is None:
        raise UserError(f"{path} is empty.")
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no settings: `key: value`, one a line.")
    return found


def _carry(
    rest: dict[str, Any], ignored: tuple[str, ...], document: Document, lines: dict[str, int], whole: bool
) -> None:
    """What is left of a file: arguments of HF Trainer, keys that change nothing, and keys that are not known here. A
    fragment changes what it says and nothing else, so that of a file that is not `whole` no default is written."""
    arguments = {}
    for key, value in rest.items():
        if key in ignored or key.startswith(SAME_TRAINING) or value in (None, "", [], {}):
            continue
        if key in KNOWN:
            arguments[key] = value
        elif value is not False:
            document.block(lines.get(key, 0), f"{key}: {value!r}: this key is not known here")
    carry_over(arguments, document, lines)
    for path, said_by in TRAINERS_DEFAULTS.items():
        if not whole and not any(name in arguments for name in said_by):
            document.unset(path)


def migrate_yaml(path: Path) -> Document:
    """The file as a document; raises `UserError` where it is none of the three."""
    found = read_yaml(path)
    tool = tool_of(found)
    if tool is not None:
        return _axolotl(found, path) if tool[0] == AXOLOTL else _llama_factory(found, path)
    if is_nemo(found):
        return migrate_nemo(found, path)
    raise UserError(
        f"{path} is not recognised: Axolotl's files have `base_model`, LLaMA-Factory's `model_name_or_path` and "
        "`stage`, NeMo AutoModel's a `recipe` or a `model._target_` of theirs. A config of this "
        "library needs no migration: `automodel config validate -c` checks it."
    )


def _axolotl(found: dict[str, Any], path: Path) -> Document:
    document, lines = Document(path.name), lines_of(path)
    rest = dict(found)
    whole = "base_model" in rest
    if whole:
        document.set("model.pretrained_model_name_or_path", rest.pop("base_model"), "base_model")
    document.set("task", CAUSAL_LM.name)
    if rest.pop("rl", None):
        document.block(lines["rl"], "rl: preference tuning is not part of this trainer")
    halves = [key for key in ("bf16", "fp16", "bfloat16", "float16") if key in found]
    missing = [key for key in AXOLOTL_REQUIRED if found.get(key) is None]
    missing += [] if found.get("num_epochs") or found.get("max_steps") else ["num_epochs"]
    for key in [*missing, *([] if halves else ["bf16"])]:
        if whole:
            document.block(0, f"{key} is not given, and its default depends on Axolotl's version; add it")
        else:
            document.note(0, f"{key} is not given: the default of this library, where the other files say nothing")
    for key in ("bfloat16", "float16"):
        if rest.pop(key, None):
            document.block(
                lines[key], f"{key}: weights without full-precision copies: training_optimizations.precision"
            )
    if rest.get("special_tokens") and set(rest["special_tokens"]) - {"pad_token"}:
        document.note(lines["special_tokens"], "special_tokens: the tokenizer's own are used")
    _axolotl_data(rest, document, lines)
    adapter = found.get("adapter")
    if adapter in ("lora", "qlora"):
        _lora(rest, document, linear=bool(rest.pop("lora_target_linear", False)))
    elif adapter:
        document.block(lines["adapter"], f"adapter: {adapter} is not LoRA")
    else:
        rest = {key: value for key, value in rest.items() if not key.startswith("lora_")}
    for key in ("load_in_4bit", "load_in_8bit"):
        if rest.pop(key, False):
            document.set(f"quantization.{key}", True, key)
    if document.get("quantization.load_in_4bit"):
        document.set("quantization.bnb_4bit_use_double_quant", True, "as Axolotl has it")
    for plugin in rest.pop("plugins", None) or ():
        if not any(known in str(plugin) for known in ("liger", "cut_cross_entropy")):  # kernels
            document.block(lines["plugins"], f"plugins: {plugin} may change the training")
    if rest.pop("wandb_project", None):
        document.set("wandb.project", found["wandb_project"], "wandb_project")
    if rest.get("bf16") == "auto":
        rest["bf16"] = True
    if "early_stopping_patience" in rest:
        document.set("early_stopping.patience", rest.pop("early_stopping_patience"), "early_stopping_patience")
    for key in ("evals_per_epoch", "saves_per_epoch"):
        if found.get(key) not in (None, 0, 1):
            document.note(lines[key], f"{key}: {found[key]}: once an epoch here, or set step_scheduler.val_every_steps")
    if rest.get("eval_steps"):
        rest["eval_strategy"] = "steps"
    renamed = {AXOLOTL_NAMES.get(key, key): value for key, value in rest.items()}
    at = {AXOLOTL_NAMES.get(key, key): line for key, line in lines.items()}
    _carry(renamed, AXOLOTL_IGNORED, document, at, whole)
    return document


def _axolotl_data(rest: dict[str, Any], document: Document, lines: dict[str, int]) -> None:
    datasets, line = rest.pop("datasets", None) or [], lines.get("datasets", 0)
    if len(datasets) > 1:
        document.block(line, f"datasets: there are {len(datasets)}; write them as dataset.mixture")
    for entry in datasets[:1]:
        document.set("dataset.path", entry.get("path"), "datasets")
        kind = entry.get("type", "")
        if kind not in ("alpaca", "chat_template", "sharegpt", "completion"):
            document.block(line, f"datasets.type: {kind!r} is a format of Axolotl's own; ours are in docs/data.md")
        if kind == "alpaca":
            document.note(
                line, "datasets.type: prompts are written by the tokenizer's chat template, or plainly where it has "
                "none, not in Alpaca's words; dataset.prompt_template can say them",
            )  # fmt: skip
        targets = {
            "split": "split", "name": "name", "data_files": "data_files", "revision": "revision",
            "field_messages": "messages_column", "field": "text_column",
        }  # fmt: skip
        for key, value in entry.items():
            if key in targets and value:
                document.set(f"dataset.{targets[key]}", value, f"datasets.{key}")
            elif value and key not in ("path", "type", "ds_type", "trust_remote_code", "conversation", "chat_template"):
                document.block(line, f"datasets.{key}: {value!r}: this key is not known here")
        template = entry.get("chat_template") or entry.get("conversation") or rest.get("chat_template")
        own = str(template or "tokenizer_default").startswith("tokenizer_default")
        if kind in ("chat_template", "sharegpt") and not own:
            document.block(
                line, f"chat_template: {template}: write it to a file and name that in dataset.chat_template, or use "
                "the tokenizer's own (tokenizer_default)",
            )  # fmt: skip
    if rest.pop("test_datasets", None):
        document.drop(lines["test_datasets"], "test_datasets: name one in validation_dataset")
    if rest.pop("tokens", None):
        document.block(lines["tokens"], "tokens: words that are added to the vocabulary have no counterpart")
    length = rest.pop("sequence_len", None)
    if length is not None:
        document.set("dataset.max_length", length, "sequence_len")
    _held_out(rest.pop("val_set_size", None), document, "val_set_size")
    if rest.get("train_on_inputs"):
        document.set("dataset.answer_only_loss", False, "train_on_inputs")
    if rest.get("sample_packing") and length:
        document.fill_rows(lines["sample_packing"], "sample_packing", length)


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
    for key, target in OF_ADAPTERS.items():
        value = rest.pop(key, None)
        if value and target == "modules_to_save" and isinstance(value, str):
            value = [name.strip() for name in value.split(",")]
        if value:
            document.set(f"peft.{target}", value, key)


def _llama_factory(found: dict[str, Any], path: Path) -> Document:
    document, lines = Document(path.name), lines_of(path)
    rest = dict(found)
    whole = "model_name_or_path" in rest
    if whole:
        document.set("model.pretrained_model_name_or_path", rest.pop("model_name_or_path"), "model_name_or_path")
    document.set("task", CAUSAL_LM.name)
    if found.get("stage", "sft") != "sft":
        document.block(lines["stage"], f"stage: {found['stage']} is not supervised tuning")
    _factory_data(rest, document, path, lines, whole)
    kind = found.get("finetuning_type", "lora")
    adapts = whole or any(key.startswith(("lora_", "finetuning_type")) for key in found)
    if kind == "lora" and adapts:
        target = rest.pop("lora_target", "all")
        if target not in ("all", None):
            names = [name.strip() for name in target.split(",")] if isinstance(target, str) else target
            rest["lora_target_modules"] = names
        _lora(rest, document, linear=False)
    elif kind not in ("full", "lora"):
        document.block(lines["finetuning_type"], f"finetuning_type: {kind} is neither lora nor full")
    bits = rest.pop("quantization_bit", None)
    method = rest.pop("quantization_method", "bitsandbytes")
    form, double = rest.pop("quantization_type", "nf4"), rest.pop("double_quantization", True)
    if bits and str(method).lower() not in ("bitsandbytes", "bnb"):
        document.block(lines["quantization_method"], f"quantization_method: {method} is not bitsandbytes'")
    if bits in (4, 8):
        document.set(f"quantization.load_in_{bits}bit", True, "quantization_bit")
    if bits == 4:
        document.set("quantization.bnb_4bit_quant_type", form, "quantization_type")
        document.set("quantization.bnb_4bit_use_double_quant", bool(double), "double_quantization")
    elif bits and bits != 8:
        document.block(lines["quantization_bit"], f"quantization_bit: {bits} is neither 4 nor 8")
    if rest.pop("enable_liger_kernel", None) is not None:
        document.note(0, "enable_liger_kernel: kernels of our own are used wherever they are faster")
    _carry(rest, FACTORY_IGNORED, document, lines, whole)
    return document


def _factory_data(rest: dict[str, Any], document: Document, path: Path, lines: dict[str, int], whole: bool) -> None:
    names = rest.pop("dataset", None)
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names or [])
    if len(names) > 1:
        document.block(lines.get("dataset", 0), f"dataset: there are {len(names)}; write them as dataset.mixture")
    for name in names[:1]:
        _registered("dataset", name, rest, path, document, lines.get("dataset", 0))
    length = rest.pop("cutoff_len", None) or (2048 if whole else None)
    if length is not None:
        document.set("dataset.max_length", length, "cutoff_len")
    if rest.get("packing") or rest.get("neat_packing"):
        key = "packing" if rest.get("packing") else "neat_packing"
        document.fill_rows(lines[key], key, length or 2048)
    if rest.get("train_on_prompt"):
        document.set("dataset.answer_only_loss", False, "train_on_prompt")
    if rest.get("max_samples"):
        document.set("dataset.num_samples_limit", rest.pop("max_samples"), "max_samples")
    eval_dataset = rest.pop("eval_dataset", None)
    if eval_dataset:
        _registered("validation_dataset", eval_dataset, rest, path, document, lines["eval_dataset"])
    _held_out(rest.pop("val_size", None), document, "val_size")
    document.note(0, "template: the tokenizer's own chat template is used")


def _registered(section: str, name: str, rest: dict[str, Any], path: Path, document: Document, line: int) -> None:
    """Sets what LLaMA-Factory's `dataset_info.json` has for a dataset: where it is, which part, which columns; without
    an entry, the name itself."""
    folder, entry = _entry_of(name, rest, path)
    file, hub = entry.pop("file_name", None), entry.pop("hf_hub_url", None)
    document.set(f"{section}.path", hub or (str(folder / file) if file else name), f"dataset {name}")
    for key, target in (("subset", "name"), ("split", "split")):
        if value := entry.pop(key, None):
            document.set(f"{section}.{target}", value, f"{INFO}: {key}")
    form, columns, tags = entry.pop("formatting", "alpaca"), entry.pop("columns", {}), entry.pop("tags", {})
    if form == "alpaca" and columns:
        known = {"instruction": columns.pop("prompt", "instruction"), "output": columns.pop("response", "output")}
        known |= {role: columns.pop(key) for role, key in (("input", "query"), ("system", "system")) if key in columns}
        document.set(f"{section}.column_mapping", known, f"{INFO}: columns")
    elif columns:
        if messages := columns.pop("messages", None):
            document.set(f"{section}.messages_column", messages, f"{INFO}: columns")
        columns = {key: value for key, value in columns.items() if value != key}  # `system` and `tools` are known
    strange = {key: value for key, value in tags.items() if value not in FACTORY_TAGS.get(key, ())}
    others = {"formatting": form} if form not in ("alpaca", "sharegpt", "openai") else {}
    for key, value in {**others, **columns, **strange, **entry}.items():
        if value and key not in ("ms_hub_url", "om_hub_url"):  # the same data elsewhere
            document.block(line, f"{name}: {INFO} has {key}: {value!r}, which is not known here")


def _entry_of(name: str, rest: dict[str, Any], path: Path) -> tuple[Path, dict[str, Any]]:
    for folder in (Path(rest.get("dataset_dir") or "data"), path.parent / "data", path.parent):
        try:
            entry = parse_json((folder / INFO).read_text(encoding="utf-8")).get(name)
        except (OSError, ValueError):
            continue
        if isinstance(entry, dict):
            return folder, entry
    return path.parent, {}
