"""Opening what a run left behind: the model in a run folder, with the settings it was trained under.

`predict` and `evaluate` must prepare text exactly as training did, so the folder's own `run/config.yaml` is read along
with the model's `config.json`. A folder without `run/` is a plain Hugging Face folder and works too, with defaults.

A run folder need not hold a model (it was stopped, or was told to save none). Then the person learns which it was and
what to do about it.
"""

from __future__ import annotations

import difflib
import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

from automodel.adapters.peft_folder import is_adapter_folder
from automodel.checkpoint import catalog
from automodel.config.complaints import Complaints
from automodel.config.environment import filled_tree
from automodel.config.errors import UserError
from automodel.config.foreign import refuse_other_tools
from automodel.config.gate import REMOTE_CODE
from automodel.config.read import read_file
from automodel.config.run_folders import trained_from_same_name
from automodel.config.yaml_text import parse_yaml
from automodel.data.config import DatasetConfig
from automodel.data.inheritance import members_of
from automodel.data.prepare import choose_max_length
from automodel.engine.folder import BASE, LAYOUT, RunFolder
from automodel.models.adapted import base_source, classes_of_folder, head_of_folder, load_adapted, tokenizer_of
from automodel.models.config import ModelConfig
from automodel.models.load import load_model, load_tokenizer, read_hf_config
from automodel.models.match_tokenizer import match_tokenizer
from automodel.models.same_base import known, sample_of
from automodel.models.save import finish_interrupted_save
from automodel.plan.check import load_run_config
from automodel.plan.config import RunConfig
from automodel.tasks.infer import infer_task, load_config
from automodel.tasks.registry import TASKS, task_named, task_with
from automodel.tasks.task import Task

logger = logging.getLogger(__name__)

WITHOUT_TRACKERS = ("wandb=null", "mlflow=null", "tensorboard=null")
"""Settings for those who only need the model of a run: the variables of trackers need not be set for that."""
WITHOUT_TRAINING = (*WITHOUT_TRACKERS, *(f"{name}=null" for name in (
    "optimizer", "lr_scheduler", "step_scheduler", "early_stopping", "benchmark",
)))  # fmt: skip
"""The same for asking a saved model, which reads none of these sections."""


@dataclass(frozen=True)
class SavedModel:
    """A model folder that was looked at, with its weights still on the disk."""

    folder: Path
    source: ModelConfig
    """The folder as a `model:` section."""
    task: Task
    hf_config: Any
    tokenizer: Any
    run: RunConfig | None
    """How it was trained; None for a plain Hugging Face folder."""
    layout: dict[str, Any] | None = None
    """How the model was asked in training, as the run noted it."""

    @property
    def dataset(self) -> DatasetConfig:
        """What the training data looked like; of a mixture, its first dataset."""
        return members_of(self.run.dataset)[0][1] if self.run else DatasetConfig()

    def as_long(self, section: DatasetConfig, max_positions: int | None) -> DatasetConfig:
        """Data of a text classifier without a run's config: cut where its tokenizer does."""
        if self.task.rows.labels != "document" or RunFolder(self.folder).config.is_file():
            return section
        length, by_default = choose_max_length(section, self.task.rows, max_positions)
        shorter = by_default and self.tokenizer.model_max_length < length
        return replace(section, max_length=self.tokenizer.model_max_length) if shorter else section

    @property
    def reads_pairs(self) -> bool | None:
        """Whether a text classifier was trained on pairs of texts; None where nobody noted it."""
        if self.dataset.text_pair_column or (self.dataset.column_mapping or {}).get("text_pair"):
            return True
        return None if self.layout is None else bool(self.layout.get("pair"))

    @property
    def label_names(self) -> list[str]:
        """Names of a classifier's classes, in the order of its logits."""
        return [str(self.hf_config.id2label[i]) for i in range(self.hf_config.num_labels)]

    @property
    def has_own_names(self) -> bool:
        """Whether anybody named the classes; transformers fills in LABEL_0, LABEL_1, … otherwise."""
        return self.label_names != [f"LABEL_{i}" for i in range(self.hf_config.num_labels)]

    @property
    def problem_type(self) -> str | None:
        """What a text classifier's logits mean, by transformers' own rule where the config leaves it open."""
        if self.task.rows.labels != "document":
            return None
        fallback = "regression" if self.hf_config.num_labels == 1 else "single_label_classification"
        return self.hf_config.problem_type or fallback

    def load(self, device: str, dtype: torch.dtype = torch.float32) -> Any:
        """The model with its weights, ready to be asked."""
        if is_adapter_folder(self.folder):
            self._compare_base()
            model = load_adapted(self.source, self.hf_config, self.task.head, dtype=dtype, device=device)
        else:
            model = load_model(self.source, self.hf_config, self.task.head, dtype=dtype, device=device)
        match_tokenizer(model, self.tokenizer)
        return model.eval()

    def _compare_base(self) -> None:
        """Says so where the weights below an adapter are not those that it was trained beside."""
        kept, base = RunFolder(self.folder).read_json(BASE), base_source(self.source)
        if kept is not None and known(kept["sample"]) and sample_of(base) not in (None, kept["sample"]):
            logger.warning(
                "the weights of '%s' were replaced since the adapter in '%s' was trained beside them: what it answers "
                "now is not what it learned", base.pretrained_model_name_or_path, self.folder,
            )  # fmt: skip

    def saved_dtype(self) -> torch.dtype:
        name = str(getattr(self.hf_config, "dtype", None) or "float32").removeprefix("torch.")
        return getattr(torch, name)


def open_saved(
    folder: str | Path, *, files: Sequence[Path] = (), settings: Sequence[str] = (), trust: Sequence[str] = ()
) -> SavedModel:
    """Reads configs and tokenizer of a run folder. `files` and `settings` are layered over its `run/config.yaml`."""
    root = require_model(folder)
    run = None
    if RunFolder(root).config.is_file():
        layers = [RunFolder(root).config, *files]
        run = load_run_config(layers, [*WITHOUT_TRAINING, *settings], trust, reads_data=False)
    elif files or settings:
        run = load_run_config(files, [f"model={quoted(str(root))}", *settings], trust, reads_data=False)
    remote = run.model.trust_remote_code if run else REMOTE_CODE in trust
    source = ModelConfig(pretrained_model_name_or_path=str(root), trust_remote_code=remote)
    layout = RunFolder(root).read_json(LAYOUT)
    if not (root / "config.json").is_file():  # an adapter of a language model, or one that somebody else saved
        # Of the base's config, in training: the run's own config says it, or the note that a converted one has of it.
        said = run.model.extra if run else {}
        noted = (RunFolder(root).read_json(BASE) or {}).get("changed", {})
        rest = {key: value for key, value in noted.items() if key not in said}
        changed = filled_tree(rest, str(RunFolder(root).run / BASE)) | said
        source_of_head = replace(source, extra=changed)
        head = head_of_folder(source_of_head)
        task = task_with(head)
        hf_config = load_config(base_source(source_of_head), task, classes_of_folder(source_of_head, head))
        return SavedModel(root, source, task, hf_config, load_tokenizer(tokenizer_of(source), hf_config), run, layout)
    task = _task_of(source, run)
    hf_config = load_config(source, task)
    return SavedModel(root, source, task, hf_config, load_tokenizer(source, hf_config), run, layout)


def quoted(value: str) -> str:
    """A value for a setting (`key=value`) that is taken literally."""
    return json.dumps(value, ensure_ascii=False).replace("${", "$${")


def require_model(folder: str | Path) -> Path:
    """The folder, if it holds a model; a `UserError` that says why not, otherwise."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        cached = _in_cache(str(folder))
        if cached is not None:
            return cached
        if root.is_file():
            _refuse_file(root)
        near = []
        if root.parent.is_dir():
            near = difflib.get_close_matches(root.name, [p.name for p in root.parent.iterdir() if p.is_dir()], n=1)
        hint = f" Did you mean '{root.parent / near[0]}'?" if near else ""
        raise UserError(f"there is no folder '{folder}'. Give the run folder (checkpoint.checkpoint_dir).{hint}")
    finish_interrupted_save(root)
    if not (root / "config.json").is_file() and not is_adapter_folder(root):
        raise _no_model(root)
    # Without `./`, a name could be one of the hub's.
    return root.absolute() if trained_from_same_name(str(root)) else root


def _in_cache(name: str) -> Path | None:
    """The folder of a hub model (`org/name`) that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _refuse_file(path: Path) -> NoReturn:
    """Raises `UserError` for a file where a folder should be, which may be another tool's config."""
    if path.suffix in (".yaml", ".yml", ".json"):
        raw = read_file(path, 0, Complaints())
        if raw is not None:
            refuse_other_tools(str(path), raw.entries)
    raise UserError(f"'{path}' is a file. Give the folder of a run that is finished (its checkpoint.checkpoint_dir).")


def _no_model(root: Path) -> UserError:
    folder = RunFolder(root)
    if root.name == "run" and ((root.parent / "config.json").is_file() or is_adapter_folder(root.parent)):
        return UserError(f"'{root}' is the record of a run; the model lies beside it. Give '{root.parent}'.")
    place = root.absolute()
    if catalog.NAME.fullmatch(place.name) and place.parent.name == "steps":
        run, step = place.parents[2], int(place.name.removeprefix("step-"))
        return UserError(
            f"'{root}' is a checkpoint: weights to resume from, without a config. Give its run, '{run}', or make a "
            f"model of this step: automodel checkpoint convert {shlex.quote(str(run))} --step {step} --out FOLDER"
        )
    if not folder.holds_run():
        names = sorted(p.name for p in root.iterdir())
        held = ", ".join(names[:6]) + (", …" if len(names) > 6 else "") if names else "nothing"
        return UserError(
            f"'{root}' holds no model: there is no config.json in it (it holds: {held}). Give a run folder, or a "
            "folder that `save_pretrained` wrote."
        )
    try:
        config = parse_yaml(folder.config.read_text()) or {}
    except (OSError, yaml.YAMLError):
        config = {}
    command = f"automodel finetune llm -c {shlex.quote(str(folder.config))}"
    if config.get("checkpoint", {}).get("enabled") is False:
        return UserError(
            f"the run in '{root}' saved no model, because checkpoint.enabled was false. Train again with it: "
            f"{command} checkpoint.enabled=true"
        )
    summary = folder.read_json("summary.json") or {}
    after = f" after step {summary['steps']}" if summary.get("steps") else ""
    state = f"was interrupted{after}" if summary.get("status") == "interrupted" else "did not finish, or is still going"
    can_resume = any(folder.steps.glob("step-*"))
    what = f"Start it again: {command} --overwrite"
    if can_resume:
        what = (
            f"Continue it: {command} --resume\n"
            "or make a model of its last checkpoint: automodel checkpoint convert "
            f"{shlex.quote(str(root))} --out FOLDER"
        )
    return UserError(f"the run in '{root}' {state}, and its model is saved when a run ends. {what}")


def _task_of(source: ModelConfig, run: RunConfig | None) -> Task:
    """The task the saved weights have a head for."""
    hf_config = read_hf_config(source)
    can = infer_task(source, None, hf_config)
    architecture = (getattr(hf_config, "architectures", None) or ["a model of unknown class"])[0]
    if can is None:
        raise UserError(
            f"'{source.pretrained_model_name_or_path}' holds {architecture}, which has no head for any of "
            f"{', '.join(map(str, TASKS))}. Fine-tune it first: automodel finetune llm -c run.yaml"
        )
    if run is not None and run.task is not None and task_named(run.task).head != can.head:
        raise UserError(
            f"'{source.pretrained_model_name_or_path}' holds {architecture}, a model for {can}, but the config says "
            f"task: {run.task}. Give the folder of that run, or remove `task`."
        )
    return can
