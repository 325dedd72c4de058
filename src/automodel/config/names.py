"""What a wrong key was probably meant to be.

In this order: the same key in another section, a near spelling in this one, a name people bring from Hugging Face's
TrainingArguments or other trainers, a near spelling elsewhere.
"""

from __future__ import annotations

from difflib import get_close_matches

from automodel.config.fields import fields_of, keys_of, sections_of
from automodel.config.section import Section

LONGEST = 200  # letters of a word that is compared with names

# Names from TrainingArguments, JSON configs and other trainers, and where the same thing is set here.
FAMILIAR = {
    "batch_size": "dataloader.batch_size",
    "bs": "dataloader.batch_size",
    "per_device_train_batch_size": "dataloader.batch_size",
    "micro_batch_size": "dataloader.batch_size",
    "per_device_eval_batch_size": "validation_dataloader.batch_size",
    "eval_batch_size": "validation_dataloader.batch_size",
    "train_batch_size": "step_scheduler.global_batch_size",
    "dataloader_num_workers": "dataloader.num_workers",
    "dataloader_pin_memory": "dataloader.pin_memory",
    "epochs": "step_scheduler.num_epochs",
    "num_epoch": "step_scheduler.num_epochs",
    "n_epochs": "step_scheduler.num_epochs",
    "max_epochs": "step_scheduler.num_epochs",
    "num_train_epochs": "step_scheduler.num_epochs",
    "steps": "step_scheduler.max_steps",
    "num_steps": "step_scheduler.max_steps",
    "gradient_accumulation": "step_scheduler.grad_acc_steps",
    "accumulate_grad_batches": "step_scheduler.grad_acc_steps",
    "eval_steps": "step_scheduler.val_every_steps",
    "eval_every": "step_scheduler.val_every_steps",
    "logging_steps": "step_scheduler.log_every_steps",
    "save_steps": "step_scheduler.ckpt_every_steps",
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "scheduler": "lr_scheduler.name",
    "warmup": "lr_scheduler.warmup_ratio",
    "max_grad_norm": "training_optimizations.gradient_clipping",
    "clip_grad_norm": "training_optimizations.gradient_clipping",
    "grad_clip": "training_optimizations.gradient_clipping",
    "torch_compile": "compile.enabled",
    "torch_compile_mode": "compile.mode",
    "max_seq_length": "dataset.max_length",
    "max_seq_len": "dataset.max_length",
    "block_size": "dataset.max_length",
    "train_file": "dataset.path",
    "train_dataset": "dataset",
    "training_dataset": "dataset",
    "data": "dataset",
    "validation_file": "validation_dataset.path",
    "eval_dataset": "validation_dataset",
    "val_dataset": "validation_dataset",
    "test_dataset": "validation_dataset",
    "model_name": "model.pretrained_model_name_or_path",
    "output": "checkpoint.checkpoint_dir",
    "output_dir": "checkpoint.checkpoint_dir",
    "run_name": "wandb.name",
    "use_4bit": "quantization.load_in_4bit",
    "lora": "peft",
    "fsdp": "distributed",
    "packing": "packed_sequence.enabled",
    "loss": "loss_fn",
    "optim": "optimizer.name",
    "dropout": "model.hidden_dropout_prob",
    "random_seed": "seed",
    "patience": "early_stopping.patience",
}


# Keys of files that `automodel migrate` reads.
OTHER_TOOLS = {
    **dict.fromkeys(("recipe", "dist_env", "rng"), "NeMo AutoModel"),
    **dict.fromkeys(("base_model", "sequence_len", "sample_packing"), "Axolotl"),
    **dict.fromkeys(("stage", "finetuning_type", "cutoff_len"), "LLaMA-Factory"),
}


def homes_of(root: type[Section], key: str) -> list[str]:
    """The dotted paths at which `key`, or something it is an alias of, is set."""
    homes = []
    for path, section in sections_of(root):
        name = section.ALIASES.get(key, key)
        if name in fields_of(section) and name != "target":
            homes.append(f"{path}.{name}" if path else name)
    return homes


def near(word: str, candidates: list[str], cutoff: float = 0.7) -> str | None:
    """The nearest candidate. Case and `-` against `_` do not count."""
    if len(word) > LONGEST:  # comparing takes time by the square of the length
        return None
    folded = {c.lower().replace("-", "_"): c for c in reversed(candidates)}
    close = get_close_matches(word.lower().replace("-", "_"), list(folded), n=1, cutoff=cutoff)
    return folded[close[0]] if close else None


def spellings(section: type[Section]) -> list[str]:
    return [*keys_of(section), *section.ALIASES]


def advice(root: type[Section], section: type[Section], key: str) -> str:
    """What to write instead of the unknown `key` in `section`; empty where there is no good guess."""
    if key in OTHER_TOOLS:
        return f"this is {OTHER_TOOLS[key]}'s; `automodel migrate` makes a config of such a file."
    elsewhere = homes_of(root, key)
    familiar = FAMILIAR.get(key.lower().replace("-", "_"))
    if familiar and familiar.split(".")[0] not in fields_of(root):
        familiar = None
    if familiar:
        return _belongs(key, familiar)
    here = near(key, spellings(section))
    strong = near(key, spellings(section), cutoff=0.85)
    if strong:
        return f"did you mean `{strong}`?"
    if elsewhere:
        return _belongs(key, elsewhere[0]) if len(elsewhere) < 4 else _one_of(key, elsewhere)
    if here:
        return f"did you mean `{here}`?"
    everywhere = [k for _, s in sections_of(root) for k in spellings(s) if k != "_target_"]
    far = near(key, everywhere, cutoff=0.85)
    if far:
        return f"did you mean `{homes_of(root, far)[0]}`?"
    return ""


def _belongs(key: str, home: str) -> str:
    section, _, name = home.rpartition(".")
    if not section:
        return f"did you mean `{home}`?"
    return f"it belongs under `{section}:`." if name == key else f"here it is `{name}` under `{section}:`."


def _one_of(key: str, homes: list[str]) -> str:
    sections = ", ".join(f"`{h.rpartition('.')[0]}:`" for h in homes[:4] if "." in h)
    return f"`{key}` is a key of {sections} and others; indent it under the one you mean."


def listing(section: type[Section], most: int = 14) -> str:
    """The keys of a section, for when there is no good guess."""
    keys = keys_of(section)
    rest = f", … ({len(keys) - most} more)" if len(keys) > most else ""
    return ", ".join(keys[:most]) + rest
