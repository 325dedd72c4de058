"""Saved arguments: the JSON that `TrainingArguments.to_json_string` writes, and the `training_args.bin` beside a model.

The latter is a pickle, and a pickle may run anything when it is loaded. So it is not loaded: an unpickler reads it that
resolves no name at all. Objects of transformers and accelerate become empty stand-ins with their attributes,
enumerations the words they were made of; any other name in the file is refused.
"""

from __future__ import annotations

import io
import pickle
import shlex
import zipfile
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.config.json_text import parse_json
from automodel.migrate.document import Document
from automodel.migrate.supervised import saved_supervised
from automodel.migrate.training_arguments import carry_over

ENUMERATIONS = {
    "IntervalStrategy", "SaveStrategy", "HubStrategy", "SchedulerType", "OptimizerNames", "DebugOption",
    "EvaluationStrategy", "ParallelMode", "FSDPOption", "DistributedType",
}  # fmt: skip
FLAT_ONLY = {
    "provider", "use_4bit", "use_8bit", "use_nested_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "lora_r",
    "lora_alpha", "lora_dropout", "lora_target_modules", "max_seq_length", "model_name", "base_model", "dataset_path",
    "packing",
}  # fmt: skip
"""Keys of flat settings that TrainingArguments do not have."""
FIELDS_SAVED = 60
"""Saved arguments have more fields than this, whoever made them (TRL's have `packing`, too)."""
PACKAGES = ("transformers.", "accelerate.", "trl.", "automodel.trainer.")


class _Object:
    """Stands in for an object of a pickle: its class's name, and its attributes."""

    kind = ""

    def __init__(self, *args: Any, **kwargs: Any):
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {}


class _Reader(pickle.Unpickler):
    """An unpickler that makes nothing but stand-ins, words and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.".startswith(PACKAGES):
            if name in ENUMERATIONS:
                return _word
            return type(name, (_Object,), {"kind": name})
        if (module, name) in (("torch", "device"), ("torch._utils", "_rebuild_device")):
            return _word
        if module in ("copyreg", "copy_reg") and name == "_reconstructor":
            return lambda kind, base, state: kind()
        if module in ("builtins", "__builtin__") and name == "object":
            return object
        if module in ("datetime",) and name == "timedelta":
            return lambda *parts: parts
        raise UserError(
            f"the file asks for {module}.{name}, which arguments of a Trainer never hold. It was not read on."
        )

    def persistent_load(self, pid: Any) -> Any:
        raise UserError("the file holds tensors; this is not a training_args.bin.")


def _word(*parts: Any) -> Any:
    return parts[0] if len(parts) == 1 else ":".join(map(str, parts))


def read_bin(path: Path) -> dict[str, Any]:
    """The attributes of the arguments in a `training_args.bin`."""
    try:
        with zipfile.ZipFile(path) as archive:
            inside = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            content = archive.read(inside)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise UserError(f"{path} is not what torch.save writes: {error or 'it has no data.pkl'}.") from error
    try:
        found = _Reader(io.BytesIO(content)).load()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise UserError(f"{path} cannot be read: {type(error).__name__}: {error}.") from error
    if not isinstance(found, _Object) or not found.kind.endswith(("TrainingArguments", "Config")):
        raise UserError(f"{path} does not hold the arguments of a Trainer.")
    return {name: value for name, value in found.state.items() if not isinstance(value, _Object)}


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON: {error}. Flat settings with comments need no migration: they are a config, as in "
            f"`automodel finetune llm -c {shlex.quote(str(path))}`."
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__}, not the arguments of a Trainer.")
    other = sorted(set(found) & FLAT_ONLY)
    if other and len(found) < FIELDS_SAVED:
        raise UserError(
            f"{path} holds flat settings ({', '.join(other[:4])}), which need no migration: they are a config as "
            f"they are. `automodel config show -c {shlex.quote(str(path))}` shows them in their sections; add `-c` "
            "with model and dataset where they name none."
        )
    return found


def migrate_saved(path: Path) -> Document:
    """Saved arguments as a document. They name neither model nor data."""
    document = Document(path.name)
    given = read_bin(path) if path.suffix == ".bin" else read_json(path)
    known = {name: value for name, value in given.items() if not name.startswith("_") and name not in DERIVED}
    carry_over(saved_supervised(document, known), document)
    return document


DERIVED = (
    "distributed_state", "deepspeed_plugin", "mixed_precision", "fsdp_plugin_args", "hf_deepspeed_config", "device",
    "train_batch_size", "eval_batch_size", "n_gpu", "world_size",
)  # fmt: skip
"""Attributes that follow from others."""
