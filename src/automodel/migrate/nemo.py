"""NeMo AutoModel's recipes. Their sections are nearly those of a config, so most keys are carried over as they are.

What a recipe leaves out is NeMo's default and not ours, and is written down: no `lr_scheduler` is a constant rate, one
without a shape is a cosine after a tenth of warm-up. What is set up by itself here (processes, collation, formats) is
left out. Datasets that are made by code of theirs, other recipes than fine-tuning, sections that are none, and keys
that nobody here knows stand in the way, with their lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from automodel.config.fields import sections_of
from automodel.config.names import near, spellings
from automodel.migrate.document import Document, lines_of
from automodel.plan.config import RunConfig
from automodel.tasks.registry import CAUSAL_LM, TEXT_CLASSIFICATION

RECIPES = {
    "TrainFinetuneRecipeForNextTokenPrediction": CAUSAL_LM.name,
    "TrainFinetuneRecipeForSequenceClassification": TEXT_CLASSIFICATION.name,
}
SET_UP_HERE = {
    "dist_env": "processes find each other by themselves",
    "ci": "settings of NeMo's own tests",
    "checkpoint.model_save_format": "models are saved as safetensors",
    "checkpoint.save_consolidated": "the model is always saved whole, as a Hugging Face folder",
    "checkpoint.dequantize_base_checkpoint": "`automodel export` writes base and adapter as one",
    "checkpoint.skip_task_head_prefixes_for_base_model": "a head that the base does not have is drawn anew",
    "checkpoint.v4_compatible": "models are saved as the installed transformers saves them",
    "dataloader.collate_fn": "batches are packed",
    "validation_dataloader.collate_fn": "batches are packed",
    "packed_sequence.packing_strategy": "bins are filled by best fit",
    "peft.use_triton": "kernels are used wherever they are faster",
    "compile.backend": "the compiler is inductor",
    "rng.ranked": "every rank draws what one process would draw",
    "step_scheduler.gc_every_steps": "when Python collects garbage is decided here",
    "step_scheduler.log_remote_every_steps": "trackers get every logged step",
    "wandb.save_dir": "files of wandb lie in its own folder",
}
OF_DATA = {
    "dataset_name": "path", "path_or_dataset_id": "path", "path_or_dataset": "path", "data_files": "data_files",
    "name": "name", "split": "split", "column_mapping": "column_mapping", "answer_only_loss_mask": "answer_only_loss",
    "seq_length": "max_length", "limit_dataset_samples": "num_samples_limit",
    "num_samples_limit": "num_samples_limit", "max_length": "max_length",
}  # fmt: skip
NOT_OF_DATA = {
    "padding": "nothing is padded",
    "truncation": "what is longer than max_length is cut",
    "start_of_turn_token": "the chat template says where answers begin",
    "use_hf_chat_template": "the tokenizer's chat template is used where it has one",
    "tokenizer": "the model's own is used",
    "trust_remote_code": "data never bring code of their own",
    "shuffle_seed": "the run's seed orders the rows",
    "repeat_on_exhaustion": "epochs follow each other",
}
DATASETS: dict[str, dict[str, Any]] = {
    "squad.make_squad_dataset": {"_target_": "nemo_automodel.components.datasets.llm.squad.make_squad_dataset"},
    "column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset": {},
    "column_mapped_text_instruction_iterable_dataset.ColumnMappedTextInstructionIterableDataset": {},
    "chat_dataset.ChatDataset": {},
    "text_classification.TextClassificationDataset": {},
    "seq_cls.GLUE_MRPC": {"path": "nyu-mll/glue", "name": "mrpc"},
    "seq_cls.YelpReviewFull": {"path": "Yelp/yelp_review_full"},
    "seq_cls.IMDB": {"path": "stanfordnlp/imdb"},
}
SECTIONS = ("tokenizer", "rng", "clip_grad_norm", "distributed_config", *dict(sections_of(RunConfig)))
SHAPES = {"inverse-square-root": "inverse_sqrt", "WSD": "wsd"}
ABSENT = (None, "None", "none", "null", "")


def is_nemo(found: dict[str, Any]) -> bool:
    model = found.get("model")
    target = model.get("_target_") if isinstance(model, dict) else None
    return str(target).startswith("nemo_automodel.") or _task_of(found.get("recipe")) is not None


def _task_of(recipe: Any) -> str | None:
    """By the name of the recipe's class, with or without its module."""
    return RECIPES.get(str(recipe).rpartition(".")[2])


class Recipe:
    """A recipe on its way: sections are taken out one by one, and what is left at the end is not known here."""

    def __init__(self, found: dict[str, Any], path: Path):
        self.rest: dict[str, Any] = {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in found.items()
            if value not in ABSENT
        }
        self.document, self.lines = Document(path.name), lines_of(path)

    def take(self, path: str) -> Any:
        """A value, which is then dealt with; None where the recipe does not have it."""
        section, dot, key = path.partition(".")
        if not dot:
            return self.rest.pop(section, None)
        inner = self.rest.get(section)
        return inner.pop(key, None) if isinstance(inner, dict) else None

    def block(self, path: str, why: str) -> None:
        self.document.block(self.lines.get(path, 0), f"{path}: {why}")

    def drop(self, path: str, why: str) -> None:
        self.document.drop(self.lines.get(path, 0), f"{path}: {why}")

    def unknown(self, path: str, value: Any, known: Iterable[str]) -> None:
        meant = near(path.rpartition(".")[2], list(known), cutoff=0.85)
        self.block(path, f"{value!r}: this key is not known here{f'; did you mean {meant}?' if meant else ''}")

    def carry(self, section: str, known: list[str]) -> None:
        """A section whose keys are ours too."""
        for key, value in (self.take(section) or {}).items():
            if value in ABSENT:
                continue
            if key not in known:
                self.unknown(f"{section}.{key}", value, known)
            else:
                self.document.set(f"{section}.{key}", value)


def migrate_nemo(found: dict[str, Any], path: Path) -> Document:
    recipe = Recipe(found, path)
    for key, why in SET_UP_HERE.items():
        if recipe.take(key) is not None:
            recipe.drop(key, why)
    _sections(recipe)
    _task(recipe)
    for section in ("dataset", "validation_dataset"):
        _data(recipe, section)
    _ranks(recipe)
    _steps_and_rate(recipe)
    _packing(recipe)
    _adapted(recipe)
    ours = dict(sections_of(RunConfig))
    for section in list(recipe.rest):
        if section in ours:
            recipe.carry(section, spellings(ours[section]))
        else:
            recipe.block(section, "this is not known here")
    return recipe.document


def _sections(recipe: Recipe) -> None:
    """Whatever is known by its keys is a mapping after this. A name alone is enough for some of them."""
    for section in SECTIONS:
        value = recipe.rest.get(section)
        if value is None or isinstance(value, dict):
            continue
        del recipe.rest[section]
        if section == "tokenizer" and isinstance(value, str):
            recipe.rest[section] = {"pretrained_model_name_or_path": value}
        elif section == "distributed" and value in ("ddp", "fsdp2"):
            recipe.rest[section] = {"strategy": value}
        else:
            recipe.block(section, f"{value!r}: only a section with keys of its own is carried over")


def _task(recipe: Recipe) -> None:
    name = str(recipe.take("recipe") or "")
    target = str(recipe.take("model._target_") or "")
    task = _task_of(name)
    if name and task is None:
        recipe.block("recipe", f"{name} is not fine-tuning of a language model or a classifier")
    elif not target.endswith(".from_pretrained"):
        recipe.block("model", f"{target or 'no _target_'}: only pretrained models are carried over")
    recipe.document.set(
        "task", task or (TEXT_CLASSIFICATION if "SequenceClass" in target else CAUSAL_LM).name, "recipe"
    )
    tokenizer = recipe.take("tokenizer") or {}
    if name := tokenizer.pop("pretrained_model_name_or_path", None):
        recipe.document.set("model.tokenizer", name, "tokenizer")
    for key in tokenizer:
        if key != "_target_":
            recipe.drop(f"tokenizer.{key}", "the tokenizer's own settings are used")
    seed = recipe.take("rng.seed")
    recipe.take("rng")
    if seed is not None:
        recipe.document.set("seed", seed, "rng.seed")
    if (norm := recipe.take("clip_grad_norm.max_norm")) is not None:
        recipe.document.set("training_optimizations.gradient_clipping", norm, "clip_grad_norm.max_norm")
        recipe.take("clip_grad_norm")
    recipe.document.note(
        0, "precision: full-precision weights and states stand behind bf16 here; NeMo's are bf16 alone "
        "(training_optimizations.precision: bf16-pure)",
    )  # fmt: skip


def _data(recipe: Recipe, section: str) -> None:
    given = recipe.take(section)
    if not isinstance(given, dict):
        return
    target = str(given.get("_target_", "")).removeprefix("nemo_automodel.components.datasets.llm.")
    if target not in DATASETS:
        recipe.block(f"{section}._target_", f"{target} makes its rows by code of its own; write them to a file")
        return
    for key, value in DATASETS[target].items():
        recipe.document.set(f"{section}.{key}", value, target.rpartition(".")[2])
    for key, value in given.items():
        if key == "_target_" or value in ABSENT:
            continue
        if key in NOT_OF_DATA:
            recipe.drop(f"{section}.{key}", NOT_OF_DATA[key])
        elif key == "chat_template":
            recipe.block(f"{section}.{key}", f"write the template to a file and name that in {section}.chat_template")
        elif key not in OF_DATA:
            recipe.unknown(f"{section}.{key}", value, OF_DATA)
        elif OF_DATA[key] == "path" and isinstance(value, list):
            _files(recipe, section, value)
        else:
            recipe.document.set(f"{section}.{OF_DATA[key]}", value, key if key != OF_DATA[key] else "")
    if section == "validation_dataset":
        recipe.document.set("checkpoint.keep_best", False, "NeMo ends with the last weights; without it: the best")
    path = str(recipe.document.get(f"{section}.path"))
    if Path(path).suffix in (".json", ".jsonl") and recipe.document.get(f"{section}.split"):
        recipe.document.unset(f"{section}.split")  # a file is one part, whatever it is called


def _files(recipe: Recipe, section: str, files: list[str]) -> None:
    folders = {str(Path(file).parent) for file in files}
    if len(folders) > 1:
        recipe.block(f"{section}.path_or_dataset_id", "files of several folders; write them as dataset.mixture")
        return
    recipe.document.set(f"{section}.path", folders.pop(), "path_or_dataset_id")
    recipe.document.set(f"{section}.data_files", [Path(file).name for file in files], "path_or_dataset_id")


def _ranks(recipe: Recipe) -> None:
    """`distributed`, and `distributed_config`, in which later versions have the half of it."""
    more = recipe.take("distributed_config") or {}
    kind = str(more.pop("_target_", ""))
    if kind.endswith("DDPConfig") or recipe.rest.get("distributed", {}).get("strategy") == "ddp":
        recipe.document.set("distributed.strategy", "ddp")
    elif kind.endswith("FSDP2Config"):
        recipe.document.set("distributed.strategy", "fsdp2")
    elif kind:
        recipe.block("distributed_config", f"{kind.rpartition('.')[2]} is neither FSDP2 nor DDP")
    ours = recipe.rest.setdefault("distributed", {})
    for key, value in more.items():
        ours.setdefault(key, value)
    if (stages := ours.pop("pp_size", None)) not in (1, *ABSENT):
        recipe.block("distributed.pp_size", f"{stages}: a model is not cut into stages here; tp_size and fsdp2 do it")


def _steps_and_rate(recipe: Recipe) -> None:
    steps = recipe.rest.get("step_scheduler") or {}
    if steps.get("max_steps") in ABSENT and steps.get("num_epochs") in ABSENT:
        recipe.block("step_scheduler", "max_steps or num_epochs is needed; NeMo's default depends on its version")
    if "validation_dataset" not in recipe.document.values and steps.pop("val_every_steps", None):
        recipe.drop("step_scheduler.val_every_steps", "there is no validation_dataset")
    given = recipe.take("lr_scheduler")
    if not given:
        recipe.document.set("lr_scheduler.name", "constant", "NeMo's, without lr_scheduler")
        return
    given = {key: value for key, value in given.items() if value not in ABSENT}
    shape, warmup = str(given.pop("lr_decay_style", "cosine")), given.pop("lr_warmup_steps", None)
    if shape == "constant" and warmup != 0:
        shape = "constant_with_warmup"
    recipe.document.set("lr_scheduler.name", SHAPES.get(shape, shape), "lr_decay_style")
    if warmup is None:
        recipe.document.set("lr_scheduler.warmup_ratio", 0.1, "NeMo's default, there at most 1,000 steps")
    elif warmup:
        recipe.document.set("lr_scheduler.warmup_steps", warmup, "lr_warmup_steps")
    if warmup != 0:
        recipe.document.note(0, "lr_scheduler: the warm-up begins at 0 here, in NeMo at a tenth of the rate")
    lowest = given.pop("min_lr", None)
    if not shape.startswith("constant"):
        key, value = ("min_lr_ratio", 0.01) if lowest is None else ("min_lr", lowest)
        recipe.document.set(f"lr_scheduler.{key}", value, "NeMo's default" if lowest is None else "")
    if given.pop("lr_decay_steps", None) is not None:
        recipe.block("lr_scheduler.lr_decay_steps", "the decay ends with the last step here; remove it")
    if given:
        recipe.rest["lr_scheduler"] = given


def _packing(recipe: Recipe) -> None:
    """Without a size documents are packed by the example: the same batches, nothing padded."""
    if recipe.take("packed_sequence.split_across_pack"):
        recipe.block("packed_sequence.split_across_pack", "documents are never cut at the border of a bin; remove it")
    size = recipe.take("packed_sequence.packed_sequence_size")
    if size:
        recipe.document.set("packed_sequence.packed_sequence_size", size)
    if not recipe.rest.get("packed_sequence"):
        recipe.take("packed_sequence")


def _adapted(recipe: Recipe) -> None:
    if not recipe.take("peft.match_all_linear"):
        return
    recipe.document.set("peft.target_modules", "all-linear", "match_all_linear")
    for key in ("target_modules", "exclude_modules"):
        if recipe.take(f"peft.{key}") not in (*ABSENT, []):
            recipe.drop(f"peft.{key}", "match_all_linear comes before it in NeMo, and takes every linear layer")
