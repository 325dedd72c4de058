"""Names of `TrainingArguments` that transformers removed, and what they mean today.

Scripts live longer than releases: `evaluation_strategy`, `no_cuda` or `warmup_ratio` raise a TypeError in transformers
5, although what they ask for still exists. Each old name is renamed, computed into a new one, or (where what it asks
for is always so, or never was more than a hint) left out with a note. What cannot be had any more is refused by name.

Used by the drop-in `TrainingArguments`, and by `automodel migrate`, which never imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.config.json_text import parse_json

RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "no_cuda": "use_cpu",
    "push_to_hub_token": "hub_token",
    "push_to_hub_model_id": "hub_model_id",
    "xpu_backend": "ddp_backend",
    "torchdynamo": "torch_compile_backend",
    "include_tokens_per_second": "include_num_input_tokens_seen",
}

WITHOUT_EFFECT = {
    "overwrite_output_dir": "an existing folder is always reused",
    "fp16_opt_level": "fp16 is torch's own mixed precision, which has no levels",
    "use_mps_device": "the device is found by itself",
    "tpu_num_cores": "the launcher decides on processes",
    "ray_scope": "it belongs to hyper-parameter search with Ray",
}
"""Old names that may have any value."""

REFUSED = {
    "use_ipex": "Intel's extension is no longer supported by transformers; remove it",
    "jit_mode_eval": "evaluation is not traced any more; remove it",
    "sharded_ddp": "use fsdp=True with fsdp_config, or `automodel finetune` with distributed.dp_size",
    "mp_parameters": "SageMaker's model parallelism is not part of this Trainer",
    "use_legacy_prediction_loop": "there is one prediction loop; remove it",
    "tpu_metrics_debug": "use debug='tpu_metrics_debug'",
    "push_to_hub_organization": "write it into hub_model_id: 'organization/name'",
}
"""Old names that are refused where they ask for something."""


def modern_arguments(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments under today's names, and a line for each that was translated. Raises `UserError` for those that
    cannot be."""
    arguments, notes = dict(given), []
    for old, new in RENAMED.items():
        if old in arguments:
            value = arguments.pop(old)
            if value is not None:  # transformers' own default for most of them
                _set(arguments, new, value, old)
                notes.append(f"{old} is now {new}")
    for old, reason in WITHOUT_EFFECT.items():
        if arguments.pop(old, None) not in (None, False, ""):
            notes.append(f"{old} has no effect: {reason}")
    for old, instead in REFUSED.items():
        if arguments.pop(old, None) not in (None, False, "", []):
            raise UserError(f"TrainingArguments({old}=…): {instead}.")
    for old, translate in _COMPUTED.items():
        if old in arguments:
            note = translate(arguments, arguments.pop(old))
            if note:
                notes.append(note)
    return arguments, notes


def _set(arguments: dict[str, Any], new: str, value: Any, old: str) -> None:
    if new in arguments and arguments[new] != value:
        raise UserError(
            f"TrainingArguments: {old}={value!r} is the old name of {new}, which is also given, as {arguments[new]!r}. "
            f"Keep {new}."
        )
    arguments[new] = value


def _mapping(config: Any) -> dict[str, Any]:
    """A config as TrainingArguments take it: a mapping, JSON, or the name of a JSON file."""
    if isinstance(config, str) and config:
        try:
            config = parse_json(config if config.startswith("{") else Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"TrainingArguments: {config!r} is no JSON and no file with it: {error}.") from None
    return dict(config or {})


def _group_by_length(arguments: dict[str, Any], value: Any) -> str | None:
    if not value:
        return None
    _set(arguments, "train_sampling_strategy", "group_by_length", "group_by_length")
    return "group_by_length=True is now train_sampling_strategy='group_by_length'"


def _warmup_ratio(arguments: dict[str, Any], value: Any) -> str | None:
    if not value:
        return None
    if arguments.get("warmup_steps"):  # a number of steps wins over the ratio, as it always did
        return f"warmup_ratio={value} gives way to warmup_steps={arguments['warmup_steps']}"
    if not 0 <= value <= 1:
        raise UserError(f"TrainingArguments(warmup_ratio={value!r}): it is a share of all steps, between 0 and 1.")
    # Today a value below 1 is a ratio. All steps cannot be said that way; the largest float below 1 rounds up to them.
    arguments["warmup_steps"] = value if value < 1 else 1 - 2**-53
    return f"warmup_ratio={value} is now warmup_steps={value} (below 1 it is a ratio)"


def _adafactor(arguments: dict[str, Any], value: Any) -> str | None:
    if not value:
        return None
    _set(arguments, "optim", "adafactor", "adafactor")
    return "adafactor=True is now optim='adafactor'"


def _logging_dir(arguments: dict[str, Any], value: Any) -> str | None:
    if value is None:
        return None
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(value))
    return "logging_dir is now the environment variable TENSORBOARD_LOGGING_DIR, which was set"


def _save_safetensors(arguments: dict[str, Any], value: Any) -> str | None:
    if value is False:
        raise UserError(
            "TrainingArguments(save_safetensors=False): models are saved as safetensors; pickled weights run code when "
            "they are loaded. Remove it."
        )
    return None


def _backend(arguments: dict[str, Any], value: Any) -> str | None:
    if value in (None, "auto", "amp", "cuda_amp", "cpu_amp"):
        return None
    if value == "apex":
        return "Apex is not used: torch's own mixed precision does what its author meant"
    raise UserError(f"TrainingArguments: there is no mixed-precision backend {value!r}; remove the argument.")


def _past_index(arguments: dict[str, Any], value: Any) -> str | None:
    if value is not None and value >= 0:
        raise UserError("TrainingArguments(past_index=…): transformers 5 no longer hands states from batch to batch.")
    return None


def _include_inputs(arguments: dict[str, Any], value: Any) -> str | None:
    if not value:
        return None
    arguments["include_for_metrics"] = sorted({*arguments.get("include_for_metrics", []), "inputs"})
    return "include_inputs_for_metrics=True is now include_for_metrics=['inputs']"


def _fsdp(arguments: dict[str, Any], value: Any) -> str | None:
    """Version 4 took words such as `full_shard auto_wrap`."""
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list):
        arguments["fsdp"] = value
        return None
    if not words:
        return None
    config = _mapping(arguments.get("fsdp_config"))
    config.setdefault("reshard_after_forward", "full_shard" in words or "hybrid_shard" in words)
    if "offload" in words:
        config.setdefault("cpu_offload", True)
    arguments["fsdp"], arguments["fsdp_config"] = True, config
    return f"fsdp={value!r} is now fsdp=True with fsdp_config={config}"


def _accelerator(key: str) -> Callable[[dict[str, Any], Any], str | None]:
    def translate(arguments: dict[str, Any], value: Any) -> str | None:
        if value is None:
            return None
        config = _mapping(arguments.get("accelerator_config"))
        config.setdefault(key, value)
        arguments["accelerator_config"] = config
        return f"{key} is now accelerator_config={{'{key}': {value!r}}}"

    return translate


_COMPUTED: dict[str, Callable[[dict[str, Any], Any], str | None]] = {
    "group_by_length": _group_by_length,
    "warmup_ratio": _warmup_ratio,
    "adafactor": _adafactor,
    "logging_dir": _logging_dir,
    "save_safetensors": _save_safetensors,
    "fp16_backend": _backend,
    "half_precision_backend": _backend,
    "past_index": _past_index,
    "include_inputs_for_metrics": _include_inputs,
    "fsdp": _fsdp,
    "dispatch_batches": _accelerator("dispatch_batches"),
    "split_batches": _accelerator("split_batches"),
}

OLD_NAMES = (*RENAMED, *WITHOUT_EFFECT, *REFUSED, *(name for name in _COMPUTED if name != "fsdp"))
