"""`automodel run script.py`: a script that nobody changed, with the drop-in in Trainer's place.

The one place that touches another library's names, and only in a process that was started for it: before the script
runs, `transformers.Trainer`, `TrainingArguments` and `HfArgumentParser` are ours. Two more names that old scripts
import are put where they were: `transformers.AdamW` (torch's, as transformers itself recommended when it was removed)
and Apex's `amp`, whose `initialize` hands back what it is given, since mixed precision is part of the steps. Scripts
that start others are looked after in `children.py`.

With `--compare N`, Trainer's own code first trains a copy of the model for N steps; what each needed is said at the
end.
"""

from __future__ import annotations

import copy
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.hf_argparser
import transformers.trainer
from transformers import TrainerCallback

from automodel.checkpoint import randomness
from automodel.config.errors import UserError
from automodel.trainer.arguments import TrainingArguments
from automodel.trainer.as_main import run_as_main
from automodel.trainer.children import Children, gputil_module
from automodel.trainer.old_flags import ArgumentParser
from automodel.trainer.trainer import Trainer

STOCK_TRAINER = transformers.trainer.Trainer


def _amp_module() -> types.ModuleType:
    """Apex's `amp`, as far as scripts for Trainer call it."""
    amp = types.ModuleType("apex.amp")

    def initialize(models: Any, optimizers: Any = None, *levels: Any, **options: Any) -> Any:
        print("automodel: apex.amp.initialize changes nothing: TrainingArguments(fp16=True) is enough", file=sys.stderr)
        return models, optimizers

    amp.initialize = initialize  # ty: ignore[missing-attribute]
    return amp


@contextmanager
def stand_in(trainer: bool = True) -> Generator[None]:
    """The drop-in where scripts look for Trainer, for as long as the block lasts; without `trainer` old names alone."""
    places: list[tuple[Any, str, Any]] = [
        *((module, "Trainer", Trainer) for module in (transformers, transformers.trainer) if trainer),
        *(Children().places() if trainer else ()),
        (
            transformers,
            "TrainingArguments",
            TrainingArguments,
        ),  # not in training_args: pickles name it
        *((module, "HfArgumentParser", ArgumentParser) for module in (transformers, transformers.hf_argparser)),
    ]
    if not hasattr(transformers, "AdamW"):
        places.append((transformers, "AdamW", torch.optim.AdamW))
    before = [(module, name, vars(module).get(name)) for module, name, _ in places]
    added = {}
    if find_spec("apex") is None:
        added = {"apex": types.ModuleType("apex"), "apex.amp": _amp_module()}
        added["apex"].amp = added["apex.amp"]  # ty: ignore[missing-attribute]
    if find_spec("GPUtil") is None:
        added["GPUtil"] = gputil_module()
    sys.modules |= added
    try:
        for module, name, ours in places:
            setattr(module, name, ours)
        yield
    finally:
        for module, name, theirs in before:
            if theirs is None:
                delattr(module, name)
            else:
                setattr(module, name, theirs)
        for name in added:
            sys.modules.pop(name, None)


class StepTimes(TrainerCallback):
    """When each step ended, and what the log lines said."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.pauses: set[int] = set()
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())
        if control.should_evaluate or control.should_save:
            self.pauses.add(len(self.ends))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])

    def milliseconds(self) -> float | None:
        """Median of the steps in the second half, without those that waited for an evaluation or a checkpoint."""
        first = len(self.ends) // 2
        counted = (i for i in range(max(1, first), len(self.ends)) if i not in self.pauses)
        spans = [1000 * (self.ends[i] - self.ends[i - 1]) for i in counted]
        return statistics.median(spans) if spans else None


@dataclass
class TrainCall:
    """One `train()` of the script."""

    what: str
    times: StepTimes
    stock: StepTimes | None = None

    def in_words(self) -> str:
        own = self.times.milliseconds()
        line = f"{self.what}; {len(self.times.ends)} steps"
        line += "" if own is None else f", {own:.2f} ms each"
        if self.stock is None:
            return line
        theirs = self.stock.milliseconds()
        if own is None or theirs is None:
            return f"{line}; too few steps to compare"
        return f"{line}; stock Trainer {theirs:.2f} ms over its first {len(self.stock.ends)}: {theirs / own:.2f}x"


@dataclass
class Watch:
    """Notes what each training of the script does."""

    compare: int = 0
    calls: list[TrainCall] = field(default_factory=list)

    def __call__(self, trainer: Trainer) -> None:
        acceleration = trainer.acceleration
        assert acceleration is not None
        stock = None
        if self.compare and acceleration.path != "stock":
            stock = stock_steps(trainer, self.compare)
        times = StepTimes()
        trainer.pop_callback(StepTimes)
        trainer.add_callback(times)
        self.calls.append(TrainCall(str(acceleration), times, stock))

    def summary(self) -> list[str]:
        if not self.calls:
            return ["the script did not call Trainer.train()"]
        return [call.in_words() for call in self.calls]


def stock_steps(trainer: Trainer, steps: int) -> StepTimes:
    """Trainer's own code on a copy of the model, for so many steps; everything random is put back."""
    tensors, values = randomness.capture()
    times = StepTimes()
    print(f"automodel: {steps} steps of stock Trainer first, to compare with", file=sys.stderr)
    model: Any = copy.deepcopy(trainer.model)
    if type(model).__bases__[0].__name__ == type(model).__name__:
        model.__class__ = type(model).__bases__[0]  # without the drop-in's forward
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "output_dir": folder, "max_steps": steps, "eval_strategy": "no", "save_strategy": "no", "report_to": [],
            "load_best_model_at_end": False, "push_to_hub": False, "disable_tqdm": True, "logging_steps": 10,
            "eval_on_start": False,
        }  # fmt: skip
        args = copy.copy(trainer.args)
        for name, value in changes.items():
            setattr(args, name, value)
        args.__post_init__()
        STOCK_TRAINER(
            model=model,
            args=args,
            data_collator=trainer.data_collator,
            train_dataset=trainer.train_dataset,
            processing_class=trainer.processing_class,
            callbacks=[times],
        ).train()
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    randomness.restore(tensors, values)
    return times


def run_script(script: Path, arguments: list[str], compare: int = 0) -> list[str]:
    """Runs the script as `__main__`, with the drop-in in place, and says what it did. The script's own errors and exit
    codes pass through."""
    if not script.is_file():
        raise UserError(f"automodel run: there is no script {script}.")
    watch = Watch(compare)
    Trainer.watchers.append(watch)
    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    try:
        with stand_in():
            run_as_main(script)
    finally:
        sys.argv, sys.path[:] = before
        Trainer.watchers.remove(watch)
        failed = isinstance(sys.exc_info()[1], Exception)
        for line in watch.summary() if watch.calls or not failed else ():  # what failed says enough by itself
            print(f"automodel: {line}", file=sys.stderr)
    return watch.summary()
