"""Flat JSON settings (ModelForge's, and those of many small tools around Trainer) in the sections they belong to.

    {"provider": "unsloth", "use_4bit": true, "bf16": true, "lora_r": 16, "per_device_train_batch_size": 4}

Such a file is told by its keys: JSON, with at least one that is in the table below and in no config. Each key moves to
its section; all checks and messages are then the ordinary ones, with the line of the JSON.

A file that names a model and a dataset is the tool's complete config: what the tool assumes where nothing is written
(batches of 1, four of them a step, a learning rate of 2e-4) is filled in last, where no file says otherwise. Any other
file is a fragment over a config of ours, and what it does not say stays with that config and with our defaults. Only an
adapter is added to both where weights are quantised: without one nothing could be trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automodel.config.tree import COMMAND_LINE, Entry, Mapping, Node, Place, Scalar, entry_at, is_null

PLACES = {
    "provider": "provider",
    "model_name": "model.pretrained_model_name_or_path",
    "base_model": "model.pretrained_model_name_or_path",
    "dataset_path": "dataset.path",
    "max_seq_length": "dataset.max_length",
    "use_4bit": "quantization.load_in_4bit",
    "use_8bit": "quantization.load_in_8bit",
    "bnb_4bit_compute_dtype": "quantization.bnb_4bit_compute_dtype",
    "bnb_4bit_quant_type": "quantization.bnb_4bit_quant_type",
    "use_nested_quant": "quantization.bnb_4bit_use_double_quant",
    "lora_r": "peft.dim",
    "lora_alpha": "peft.alpha",
    "lora_dropout": "peft.dropout",
    "lora_target_modules": "peft.target_modules",
    "fp16": "training_optimizations.fp16",
    "bf16": "training_optimizations.bf16",
    "tf32": "training_optimizations.tf32",
    "gradient_checkpointing": "training_optimizations.gradient_checkpointing",
    "max_grad_norm": "training_optimizations.gradient_clipping",
    "packing": "packed_sequence.enabled",
    "group_by_length": "dataloader.group_by_length",
    "per_device_train_batch_size": "dataloader.batch_size",
    "per_device_eval_batch_size": "validation_dataloader.batch_size",
    "dataloader_pin_memory": "dataloader.pin_memory",
    "dataloader_num_workers": "dataloader.num_workers",
    "gradient_accumulation_steps": "step_scheduler.grad_acc_steps",
    "num_train_epochs": "step_scheduler.num_epochs",
    "max_steps": "step_scheduler.max_steps",
    "logging_steps": "step_scheduler.log_every_steps",
    "save_steps": "step_scheduler.ckpt_every_steps",
    "eval_steps": "step_scheduler.val_every_steps",
    "optim": "optimizer.name",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "warmup_ratio": "lr_scheduler.warmup_ratio",
    "warmup_steps": "lr_scheduler.warmup_steps",
    "lr_scheduler_type": "lr_scheduler.name",
    "output_dir": "checkpoint.checkpoint_dir",
}
ALSO_OURS = {
    "optim", "learning_rate", "weight_decay", "lr_scheduler_type", "warmup_ratio", "warmup_steps",
    "gradient_checkpointing",
}  # fmt: skip
"""Keys that a config may have at its top level too; they alone do not make flat settings of a file."""
SWITCHES = ("use_4bit", "use_8bit")
OFF = ("false", "False", "0")
ZERO = ("0", "0.0")
DEFAULTS = {
    "dataloader.batch_size": "1",
    "step_scheduler.grad_acc_steps": "4",
    "optimizer.lr": "2e-4",
}
TAKEN = {
    "dataloader.batch_size": ("step_scheduler.local_batch_size",),
    "step_scheduler.grad_acc_steps": ("step_scheduler.global_batch_size",),
}
"""Keys that say the same thing, so that the default has nothing to add."""


@dataclass(frozen=True)
class FlatFile:
    """A file with flat settings."""

    name: str
    because: str
    """The key that no config of ours has at its top level."""
    complete: bool
    """Whether the file names a model and a dataset: it is its tool's whole config then."""


def deciding_key(raw: Mapping, file: str) -> str | None:
    """The key by which a file holds flat settings; none where it holds something else."""
    if not file.endswith(".json"):
        return None
    return next((key for key in raw.entries if key in PLACES and key not in ALSO_OURS), None)


def is_complete(layer: Mapping) -> bool:
    """Whether settings, with their keys in their sections, name a model and a dataset."""
    named = ("model.pretrained_model_name_or_path", "dataset.path")
    return all(entry_at(layer, path) is not None for path in named)


def sorted_into_sections(raw: Mapping) -> Mapping:
    """The settings with every key of the table in its section. A key that stands in both places stays where it is
    written, and the ordinary checks say that it is there twice."""
    out = Mapping({key: entry for key, entry in raw.entries.items() if key not in PLACES}, raw.place, text=raw.text)
    for key, entry in raw.entries.items():
        place = PLACES.get(key)
        if key in SWITCHES and _does_not_quantise(raw) and _is_off(entry.node):
            # Off is off, whatever a file below says.
            out.entries.setdefault("quantization", _null("quantization", entry))
        if place is None or _says_nothing(key, place, raw):
            continue
        if _says_none(key, raw):
            entry = _null(key, entry)
        section, dot, inner = place.partition(".")
        if not dot:
            out.entries[section] = entry
            continue
        outer = out.entries.get(section)
        if outer is None or isinstance(outer.node, Scalar):
            # `model: name` beside `max_seq_length` is a section in its short form; the key cannot join it.
            mapping = Mapping({}, entry.place)
            if outer is not None and not is_null(outer.node):
                short = {"model": "pretrained_model_name_or_path", "dataset": "path"}.get(section)
                if short is None:
                    continue
                mapping.entries[short] = Entry(short, outer.node, outer.place)
            outer = out.entries[section] = Entry(section, mapping, entry.place)
        if isinstance(outer.node, Mapping):
            # Under its own name there, so that messages name the key as it is written in the file.
            outer.node.entries.setdefault(inner, Entry(inner, entry.node, entry.place))
    return out


def _null(key: str, entry: Entry) -> Entry:
    return Entry(key, Scalar("null", True, entry.place), entry.place)


def _says_nothing(key: str, place: str, raw: Mapping) -> bool:
    """Switches that are off: no packing, which is exact here either way, and the numbers of a quantisation that no
    switch turns on."""
    node = raw.entries[key].node
    if key == "packing":
        return _is_off(node)
    return place.startswith("quantization.") and _does_not_quantise(raw)


def _does_not_quantise(raw: Mapping) -> bool:
    """Whether there are switches for few bits, and all are off."""
    switches = [raw.entries[name].node for name in SWITCHES if name in raw.entries]
    return bool(switches) and all(_is_off(node) or is_null(node) for node in switches)


def _is_off(node: Node) -> bool:
    return isinstance(node, Scalar) and node.plain and node.text in OFF


def _says_none(key: str, raw: Mapping) -> bool:
    """What Trainer reads as "not at all": no steps beside epochs (`max_steps: -1`), no epochs beside steps, no warm-up
    steps beside a ratio, no clipping. So it also takes back what a file below says."""
    node = raw.entries[key].node
    zero = isinstance(node, Scalar) and node.text in ZERO
    if key == "max_steps":
        return not _counts_steps(raw)
    if key == "num_train_epochs":
        return _counts_steps(raw)
    if key == "warmup_steps":
        return zero and "warmup_ratio" in raw.entries
    return zero and key == "max_grad_norm"


def _counts_steps(raw: Mapping) -> bool:
    """Whether `max_steps` says how long the run is."""
    steps = raw.entries.get("max_steps")
    return steps is not None and not is_null(steps.node) and getattr(steps.node, "text", "") not in ("-1", "0")


def fill_defaults(tree: Mapping, flat_files: Sequence[FlatFile]) -> list[str]:
    """What the tool assumes where no file says anything; returned in words, since it is nowhere to be read. A batch
    size from a config of ours is a whole step, and not a quarter of one."""
    size = entry_at(tree, "dataloader.batch_size")
    ours = size is not None and size.place.name not in {COMMAND_LINE, *(flat.name for flat in flat_files)}
    assumed = []
    for path, text in DEFAULTS.items() if any(flat.complete for flat in flat_files) else ():
        said = any(entry_at(tree, name) is not None for name in (path, *TAKEN.get(path, ())))
        if not said and not (ours and path == "step_scheduler.grad_acc_steps"):
            _put(tree, path, Scalar(text, True, tree.place), tree.place)
            assumed.append(f"{path}={text}")
    if "quantization" in tree.entries and not is_null(tree.entries["quantization"].node) and "peft" not in tree.entries:
        tree.entries["peft"] = Entry("peft", Mapping({}, tree.place), tree.place)
        assumed.append("peft={}")
    return assumed


def in_words(flat_files: Sequence[FlatFile], assumed: Sequence[str]) -> list[str]:
    """How each file with flat settings was read, and by which key."""
    added = f"Added: {', '.join(assumed)}." if assumed else ""
    lines = []
    for flat in flat_files:
        if flat.complete:
            means = "They name a model and a dataset, so their tool's defaults hold where no file says otherwise."
        else:
            means = "They are no whole config: what they do not say is left to the config below and to our defaults."
        lines.append(f"Flat settings in {flat.name}, told by the key '{flat.because}'. {means}")
    return [*lines[:-1], f"{lines[-1]} {added}".rstrip()] if lines else []


def _put(tree: Mapping, path: str, node: Scalar, place: Place) -> None:
    section, _, key = path.partition(".")
    outer = tree.entries.setdefault(section, Entry(section, Mapping({}, place), place))
    if isinstance(outer.node, Mapping):
        outer.node.entries[key] = Entry(key, node, place)
