"""Flat JSON settings (ModelForge's, and those of many small tools around Trainer) in the sections they belong to.

    {"provider": "unsloth", "use_4bit": true, "bf16": true, "lora_r": 16, "per_device_train_batch_size": 4}

Such a file is told by its keys: JSON, with at least one that is in the table below and in no config. Each key moves to
its section; all checks and messages are then the ordinary ones, with the line of the JSON. What the tool assumes where
nothing is written (batches of 1, four of them a step, a learning rate of 2e-4, an adapter where weights are quantised)
is filled in last, where no file says otherwise.
"""

from __future__ import annotations

from automodel.config.tree import COMMAND_LINE, Entry, Mapping, Place, Scalar, is_null

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


def is_flat(raw: Mapping, file: str) -> bool:
    """Whether a file holds flat settings."""
    return file.endswith(".json") and any(key in PLACES and key not in ALSO_OURS for key in raw.entries)


def sorted_into_sections(raw: Mapping) -> Mapping:
    """The settings with every key of the table in its section. A key that stands in both places stays where it is
    written, and the ordinary checks say that it is there twice."""
    out = Mapping({key: entry for key, entry in raw.entries.items() if key not in PLACES}, raw.place, text=raw.text)
    for key, entry in raw.entries.items():
        place = PLACES.get(key)
        if place is None or _says_nothing(key, place, raw):
            continue
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
            if key == "max_grad_norm" and isinstance(entry.node, Scalar) and entry.node.text in ZERO:
                entry = Entry(key, Scalar("null", True, entry.place), entry.place)  # Trainer's way to say: not at all
            # Under its own name there, so that messages name the key as it is written in the file.
            outer.node.entries.setdefault(inner, Entry(inner, entry.node, entry.place))
    return out


def _says_nothing(key: str, place: str, raw: Mapping) -> bool:
    """Switches that are off: no quantisation and its numbers, and no packing, which is exact here either way; and what
    means nothing to Trainer: no steps beside epochs (`max_steps: -1`), epochs beside steps, no warm-up steps beside a
    ratio."""
    node = raw.entries[key].node
    off = isinstance(node, Scalar) and node.plain and node.text in OFF
    if key == "packing":
        return off
    if key == "max_steps":
        return not _counts_steps(raw)
    if key == "num_train_epochs":
        return _counts_steps(raw)
    if key == "warmup_steps":
        return isinstance(node, Scalar) and node.text in ZERO and "warmup_ratio" in raw.entries
    if place.startswith("quantization."):
        switches = [raw.entries[name].node for name in ("use_4bit", "use_8bit") if name in raw.entries]
        on = [s for s in switches if isinstance(s, Scalar) and s.plain and s.text not in OFF]
        return not on
    return False


def _counts_steps(raw: Mapping) -> bool:
    """Whether `max_steps` says how long the run is."""
    steps = raw.entries.get("max_steps")
    return steps is not None and not is_null(steps.node) and getattr(steps.node, "text", "") not in ("-1", "0")


def fill_defaults(tree: Mapping, flat_files: set[str]) -> list[str]:
    """What the tool assumes where nobody says anything; returned in words, since it is nowhere to be read. A batch size
    from a config of ours is a whole step, and not a quarter of one."""
    ours = _file_of(tree, "dataloader.batch_size") not in {None, COMMAND_LINE, *flat_files}
    assumed = []
    for path, text in DEFAULTS.items():
        taken = any(_has(tree, other) for other in TAKEN.get(path, ()))
        if not _has(tree, path) and not taken and not (ours and path == "step_scheduler.grad_acc_steps"):
            _put(tree, path, Scalar(text, True, tree.place), tree.place)
            assumed.append(f"{path}={text}")
    if "quantization" in tree.entries and not is_null(tree.entries["quantization"].node) and "peft" not in tree.entries:
        tree.entries["peft"] = Entry("peft", Mapping({}, tree.place), tree.place)
        assumed.append("peft={}")
    return assumed


def _file_of(tree: Mapping, path: str) -> str | None:
    section, _, key = path.partition(".")
    outer = tree.entries.get(section)
    inner = outer.node.entries.get(key) if outer is not None and isinstance(outer.node, Mapping) else None
    return inner.place.name if inner is not None else None


def _has(tree: Mapping, path: str) -> bool:
    section, _, key = path.partition(".")
    outer = tree.entries.get(section)
    return outer is not None and isinstance(outer.node, Mapping) and key in outer.node.entries


def _put(tree: Mapping, path: str, node: Scalar, place: Place) -> None:
    section, _, key = path.partition(".")
    outer = tree.entries.setdefault(section, Entry(section, Mapping({}, place), place))
    if isinstance(outer.node, Mapping):
        outer.node.entries[key] = Entry(key, node, place)
