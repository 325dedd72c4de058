"""Files of other tools, told by their keys: Axolotl's and LLaMA-Factory's.

Both have a flat file whose keys are no config here. Whether it is given with `-c` or to `automodel migrate`, it is told
from a config in the same way: it has no `model` and no `dataset` section of ours, and it has a key that only that tool
has, or two that are usual there.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection

from automodel.config.errors import UserError

AXOLOTL, LLAMA_FACTORY = "Axolotl", "LLaMA-Factory"

ONLY_AXOLOTL = (
    "base_model", "sequence_len", "sample_packing", "eval_sample_packing", "pad_to_sequence_len", "lora_target_linear",
    "val_set_size", "dataset_prepared_path", "train_on_inputs", "lora_model_dir", "evals_per_epoch", "saves_per_epoch",
    "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "loss_watchdog_threshold", "shuffle_merged_datasets",
)  # fmt: skip
USUAL_IN_AXOLOTL = (
    "adapter", "datasets", "micro_batch_size", "num_epochs", "lora_r", "lora_alpha", "lora_dropout", "load_in_4bit",
    "load_in_8bit", "flash_attention", "special_tokens", "model_type", "tokenizer_type", "test_datasets",
    "early_stopping_patience", "lora_target_modules", "rl", "plugins", "wandb_project",
)  # fmt: skip
ONLY_LLAMA_FACTORY = (
    "finetuning_type", "cutoff_len", "dataset_dir", "neat_packing", "quantization_bit", "enable_liger_kernel",
    "overwrite_cache", "plot_loss", "lora_target", "lora_rank", "val_size", "train_on_prompt", "flash_attn",
)  # fmt: skip
USUAL_IN_LLAMA_FACTORY = ("model_name_or_path", "stage", "template", "do_train", "dataset", "eval_dataset")


def tool_of(keys: Collection[str], json: bool = False) -> tuple[str, str] | None:
    """The tool whose file has these keys at its top level, and the key that tells it; none for a config. `json`: the
    file is JSON, where `base_model` and the keys of an adapter may be flat settings (`flat_settings.py`)."""
    if "model" in keys:
        return None
    if "model_name_or_path" in keys or not {"base_model", "datasets"} & {*keys}:
        found = _telling(keys, ONLY_LLAMA_FACTORY, USUAL_IN_LLAMA_FACTORY)
        if found is not None:
            return LLAMA_FACTORY, found
    if "dataset" in keys:
        return None
    only = tuple(key for key in ONLY_AXOLOTL if not (json and key == "base_model"))
    found = _telling(keys, only, () if json else USUAL_IN_AXOLOTL)
    return None if found is None else (AXOLOTL, found)


def _telling(keys: Collection[str], only: Collection[str], usual: Collection[str]) -> str | None:
    """The key by which a tool's file is told."""
    found = next((key for key in keys if key in only), None)
    usually = [key for key in keys if key in usual]
    return found or (usually[0] if len(usually) > 1 else None)


def refuse_other_tools(file: str, keys: Collection[str]) -> None:
    """Raises `UserError` where a file with these keys is another tool's."""
    tool = tool_of(keys, json=file.endswith(".json"))
    if tool is not None:
        raise UserError(send_to_migrate(file, *tool))


def send_to_migrate(file: str, tool: str, because: str) -> str:
    """The line that says what the file is and what to type."""
    article = "an" if tool == AXOLOTL else "a"
    return (
        f"{file} is {article} {tool} file (it has `{because}`), not a config of automodel. "
        f"`automodel migrate {shlex.quote(str(file))} -o run.yaml` makes one of it."
    )
