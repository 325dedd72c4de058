"""A checkpoint as a plain Hugging Face folder, without training on.

The model is made as the run makes it (from `run/config.yaml`, with the labels that its data gave it, as the checkpoint
has them), takes the checkpoint's weights, and is saved as the end of a run saves it: what comes out of the last
checkpoint is what the run exported or would have exported. The data need not be there any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from automodel.adapters.attach import attach
from automodel.adapters.kept import KEPT
from automodel.checkpoint import catalog
from automodel.checkpoint.catalog import Checkpoint, DamagedCheckpointError
from automodel.checkpoint.new_folder import check_new, new_folder
from automodel.config.errors import UserError
from automodel.data.saved_tokenizer import as_training_read
from automodel.distributed.config import DistributedConfig
from automodel.engine.folder import BASE, LAYOUT, RunFolder
from automodel.engine.prepare import prepare_run
from automodel.engine.same_run import as_heard
from automodel.engine.saved import WITHOUT_TRACKERS
from automodel.engine.step import check_fit, model_tensors
from automodel.models.adapted import adapter_for_run
from automodel.models.languages import name_languages
from automodel.models.load import (
    load_model,
    load_tokenizer,
    model_limits,
    skeleton_of,
)
from automodel.models.match_tokenizer import match_tokenizer
from automodel.models.save import save_hf_folder
from automodel.plan.check import load_run_config
from automodel.plan.config import RunConfig
from automodel.tasks.infer import load_config
from automodel.tasks.registry import task_named


@dataclass(frozen=True)
class Converted:
    """What was written."""

    folder: Path
    step: int
    notes: list[str]
    kind: str = "model"
    """`model` or `adapter`."""


def convert_checkpoint(
    run: str | Path, out: str | Path, *, step: int | None = None, trust: Sequence[str] = ()
) -> Converted:
    """Writes the model of a checkpoint; without `step`, of the newest that is whole."""
    folder, target = RunFolder(Path(run).expanduser()), Path(out).expanduser()
    if not folder.config.is_file():
        raise UserError(f"'{run}' is no run folder: {folder.config} is missing.")
    check_new(target)
    checkpoint, notes = _whole(folder, step)
    kept = folder.read_json(KEPT)
    cfg = as_heard(load_run_config([folder.config], WITHOUT_TRACKERS, trust, reads_data=False), kept)
    # Early checkpoints do not know what the data said.
    facts = checkpoint.state().get("data") or _facts_of_early_ones(cfg, trust, kept)
    model, tokenizer = _made_again(cfg, facts, kept)
    own, saved = model_tensors(model), checkpoint.parts("model")
    check_fit(own, saved, str(checkpoint.folder))  # ty: ignore[invalid-argument-type]
    for name, tensor in own.items():
        tensor.data = saved[name].read()  # in the precision it was saved in
    with new_folder(target) as writing:
        save_hf_folder(model, tokenizer, writing)
        folder.hand_on(writing, LAYOUT, *([BASE] if cfg.peft is not None else []))  # `generate` asks as training did
    return Converted(target, checkpoint.step, notes, "model" if cfg.peft is None else "adapter")


def _whole(folder: RunFolder, step: int | None) -> tuple[Checkpoint, list[str]]:
    """The checkpoint that is asked for, verified; or the newest that is whole, and what was passed over."""
    notes = []
    for checkpoint in reversed(catalog.complete(folder.steps)):
        if step in (None, checkpoint.step):
            try:
                checkpoint.verify()
            except DamagedCheckpointError as error:
                if step is not None:
                    raise
                notes.append(str(error))
            else:
                return checkpoint, [f"{note} Taking the checkpoint before it." for note in notes]
    which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise UserError(f"'{folder.steps}' has {which} that is whole." + "".join(f"\n  {note}" for note in notes))


def _facts_of_early_ones(cfg: RunConfig, trust: Sequence[str], kept: dict[str, Any] | None) -> dict[str, Any]:
    cfg = replace(cfg, distributed=DistributedConfig())  # for any number of ranks
    return prepare_run(cfg, trust, kept=kept).facts_of_data()


def _made_again(cfg: RunConfig, facts: dict[str, Any], kept: dict[str, Any] | None) -> tuple[Any, Any]:
    """The run's model in the host's memory, with the names that its checkpoints have, and its tokenizer. A frozen base
    need not be in few bits: its adapter is saved without it."""
    task = task_named(facts["task"])
    hf_config = load_config(cfg.model, task, facts["num_labels"], facts["label_names"], facts["problem_type"])
    tokenizer = load_tokenizer(cfg.model, hf_config)
    name_languages(tokenizer, cfg.dataset, cfg.validation_dataset)
    positions, longest = model_limits(hf_config, task.head).max_positions, facts.get("max_length", 0)
    tokenizer = as_training_read(
        tokenizer, task.rows, cfg.dataset, positions, segments=facts["segments"], longest=longest
    )
    model = load_model(cfg.model, hf_config, task.head, dtype=torch.float32, device="cpu", seed=cfg.seed)
    match_tokenizer(model, tokenizer)
    if cfg.peft is not None:
        skeleton = skeleton_of(cfg.model, hf_config, task.head)
        attach(model, adapter_for_run(cfg.peft, cfg.model, skeleton, task.head, kept), seed=cfg.seed)
    if facts["chat_template"]:
        tokenizer.chat_template = facts["chat_template"]
    return model, tokenizer
