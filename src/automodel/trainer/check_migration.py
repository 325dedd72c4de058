"""`migrate --check`: the script and its config train the same model on the same rows, and their losses are compared.

The script is run until it calls `train()`. There its model is saved (with dropout off, since the two sides draw
differently), and stock Trainer goes through the rows in their order for a few steps. The config then does the same from
the same weights, and every loss must agree.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers
import transformers.trainer
from transformers import EarlyStoppingCallback, TrainerCallback

from automodel.config.errors import EXIT_FAILED, UserError
from automodel.trainer.arguments import TrainingArguments
from automodel.trainer.as_main import run_as_main

TOLERANCE = 1e-3


class DifferentLossesError(UserError):
    """The config trains something else than the script."""

    exit_code = EXIT_FAILED


class _Enough(BaseException):
    """Ends the script once its losses are known."""


class _Losses(TrainerCallback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.values.append(logs["loss"])


def check_migration(source: Path, config: Path, steps: int) -> str:
    """A sentence on how well they agree; raises `UserError` where they do not."""
    if source.suffix != ".py":
        raise UserError(f"--check runs a script, and {source} is none.")
    from automodel.plan.check import load_run_config

    if load_run_config([config]).packed_sequence.packed_sequence_size:
        raise UserError(
            "--check: rows are filled with several documents, each side in its own order, so their losses cannot be "
            f"compared step by step. {config} is written; compare whole runs, or check the script without packing."
        )
    with tempfile.TemporaryDirectory() as folder:
        theirs = script_losses(source, Path(folder), steps)
        ours = config_losses(config, Path(folder), steps)
    count = min(len(theirs), len(ours))
    if count == 0:
        raise UserError(f"--check: {source} logged no loss.")
    worst = max(range(count), key=lambda i: abs(theirs[i] - ours[i]))
    difference = abs(theirs[worst] - ours[worst])
    if difference > TOLERANCE * max(1.0, abs(theirs[worst])):
        raise DifferentLossesError(
            f"--check: the losses differ: at step {worst + 1} the script has {theirs[worst]:.5f}, the config "
            f"{ours[worst]:.5f}. Compare what the script does to its rows with `automodel data preview -c "
            f"{shlex.quote(str(config))}`."
        )
    return f"Checked: {count} steps of both, losses differ by at most {difference:.1e}."


def without_dropout(model: Any) -> None:
    for name, value in list(vars(model.config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(model.config, name, 0.0)
    for module in model.modules():
        if type(module).__name__ == "Dropout":
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "attn_dropout", "dropout_prob"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)


def script_losses(source: Path, folder: Path, steps: int) -> list[float]:
    """Losses of stock Trainer over the script's rows in their order."""
    stock, losses = transformers.trainer.Trainer, _Losses()

    class Stopping(stock):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            model: Any = self.model
            without_dropout(model)
            model.save_pretrained(folder / "start")
            changes = {
                "max_steps": steps, "logging_steps": 1, "logging_strategy": "steps", "eval_strategy": "no",
                "save_strategy": "no", "load_best_model_at_end": False, "output_dir": str(folder / "out"),
                "train_sampling_strategy": "sequential", "logging_nan_inf_filter": False, "report_to": [],
                "disable_tqdm": True,
            }  # fmt: skip
            for name, value in changes.items():
                setattr(self.args, name, value)
            self.args.__post_init__()
            self.remove_callback(EarlyStoppingCallback)  # it refuses to run without evaluations
            self.add_callback(losses)
            super().train()
            raise _Enough

    argv, path = sys.argv, sys.path[:]
    named = {"Trainer": Stopping, "TrainingArguments": TrainingArguments}
    before = {name: getattr(transformers, name) for name in named}
    try:
        for name, value in named.items():
            setattr(transformers, name, value)
        sys.argv = [str(source)]
        sys.path.insert(0, str(source.parent.resolve()))
        run_as_main(source)
    except _Enough:
        pass
    finally:
        sys.argv, sys.path[:] = argv, path
        for name, value in before.items():
            setattr(transformers, name, value)
    if not (folder / "start").is_dir():
        raise UserError(f"--check: {source} never called Trainer.train().")
    return losses.values


def config_losses(config: Path, folder: Path, steps: int) -> list[float]:
    """Losses of the config over the same rows, from the same weights."""
    from rich.console import Console

    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    cfg = load_run_config([config])
    name = cfg.model.pretrained_model_name_or_path
    overrides = [
        f"model.pretrained_model_name_or_path={folder / 'start'}",
        f"model.tokenizer={cfg.model.tokenizer or name}",
        "dataloader.shuffle=false",
        f"step_scheduler.max_steps={steps}",
        "step_scheduler.num_epochs=null",
        "step_scheduler.log_every_steps=1",
        f"checkpoint.checkpoint_dir={folder / 'run'}",
        "checkpoint.enabled=false",
        "early_stopping=null",
    ]
    finetune(load_run_config([config], overrides), console=Console(quiet=True, force_terminal=False))
    lines = (folder / "run" / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [entry["loss"] for entry in found if entry["split"] == "train"]
