"""`automodel quickstart --task chat`: a chat model learns a format, and it shows.

SmolLM2-135M-Instruct answers a question with a sentence, or with several. After three passes over 84 short questions
whose answers are JSON, it answers questions it has not seen with `{"answer": …, "topic": …}`: structured output, which
can be checked by a program rather than by taste. The 16 held-out questions are asked before and after, and the loss on
their right answers is measured before and after, by the same code that measures it during training.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel.cli.examples import examples_root
from automodel.cli.quickstart import finetune_file, in_a_comment, plain_console, yaml_text
from automodel.config.errors import UserError
from automodel.engine.closing import process_started, shown, this_command
from automodel.metrics.progress import duration

EPOCHS, FULL_MINUTES = 3, 4.0
KEYS = {"answer", "topic"}
LONGEST_REPLY = 48  # tokens; a JSON reply has about 16
WIDTH = 100  # characters of a reply that are shown

RECIPE = """\
# The chat quickstart: SmolLM2 learns to answer in JSON. Change anything and run it again:
#   automodel finetune llm -c {yaml} checkpoint.checkpoint_dir=./another
model:
  pretrained_model_name_or_path: {model}
task: causal-lm

dataset:
  path: {train}        # one conversation a line; only the assistant's words are learned
  max_length: 256{limit}
validation_dataset:
  path: {held_out}

step_scheduler:
  num_epochs: {epochs}
  val_every_steps: 1000    # once, at the end
  log_every_steps: 3
dataloader:
  batch_size: 8
optimizer:
  lr: 5.0e-5
lr_scheduler:
  name: linear
  warmup_ratio: 0.1
checkpoint:
  checkpoint_dir: {output}
  keep_last: 1
"""


@dataclass(frozen=True)
class Exam:
    """How a model does on the held-out questions."""

    loss: float
    """Of the right answers, mean over tokens."""
    replies: list[str]

    @property
    def valid(self) -> int:
        """Replies that are exactly the JSON asked for."""
        return sum(is_answer(reply) for reply in self.replies)


def is_answer(reply: str) -> bool:
    """Whether a reply is one JSON object with the two keys and nothing else."""
    try:
        value = json.loads(reply)
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) == KEYS and all(isinstance(v, str) for v in value.values())


def run_chat(output: Path, minutes: float, samples: int | None, overwrite: bool, model: Path | None = None) -> int:
    """The whole of it; returns the exit code. `model` is a chat model's folder to use instead of SmolLM2."""
    from automodel.cli.demo.smollm2 import smollm2_folder
    from automodel.engine.folder import open_folder

    open_folder(str(output), resume=False, overwrite=overwrite)  # before anything is downloaded or written
    console = plain_console()
    folder = model or smollm2_folder(say=console.print)
    recipe, held_out = write_recipe(output, folder, minutes, samples)
    questions = [row["messages"][0]["content"] for row in _rows(held_out)]
    console.print(f"Asking {folder.name} {len(questions)} questions before it learns anything …")
    before = examine(folder, held_out, questions)
    console.print(f"Fine-tuning it on {_count(output, samples)} short conversations that end in JSON.\n")
    finished = finetune_file(recipe, overwrite, console)
    if finished.exit_code:
        console.print(f"Continue with:  automodel finetune llm -c {shlex.quote(str(recipe))} --resume")
        return finished.exit_code
    after = Exam(finished.summary["validation"]["loss"], ask(finished.folder, questions))
    _tell(before, after, questions, finished, output, recipe, console)
    return 0


def examine(folder: Path, held_out: Path, questions: list[str]) -> Exam:
    from automodel.models.lean_imports import import_transformers

    import_transformers()
    from automodel.engine.assess import assess

    measured = assess(folder, dataset=str(held_out), settings=["task=causal-lm", "dataset.max_length=256"])
    return Exam(measured.metrics.values["loss"], ask(folder, questions))


def ask(folder: Path, questions: list[str]) -> list[str]:
    """The model's most likely reply to each question."""
    from automodel.engine.predict import Predictor

    replies = Predictor(folder).generate(questions, max_new_tokens=LONGEST_REPLY)
    return [" ".join(reply.prediction.split()) if reply else "" for reply in replies]


def write_recipe(output: Path, model: Path, minutes: float, samples: int | None) -> tuple[Path, Path]:
    """Data and YAML into the output folder; returns the YAML and the held-out questions."""
    data = output.absolute() / "data"
    data.mkdir(parents=True, exist_ok=True)
    for name in ("train", "held_out"):
        shutil.copyfile(examples_root() / "data" / f"json_answers_{name}.jsonl", data / f"{name}.jsonl")
    known = len(_rows(data / "train.jsonl"))
    if samples is not None and samples > known:
        raise UserError(f"--samples: there are {known} conversations to learn from; {samples} are asked for.")
    recipe = output / "quickstart.yaml"
    text = RECIPE.format(
        yaml=in_a_comment(recipe),
        model=yaml_text(model),
        train=yaml_text(data / "train.jsonl"),
        held_out=yaml_text(data / "held_out.jsonl"),
        limit=f"\n  num_samples_limit: {samples}" if samples else "",
        epochs=max(1, round(EPOCHS * minutes / FULL_MINUTES)),
        output=yaml_text(output),
    )
    recipe.write_text(text, encoding="utf-8")
    return recipe, data / "held_out.jsonl"


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _count(output: Path, samples: int | None) -> int:
    return samples or len(_rows(output / "data" / "train.jsonl"))


def _tell(before: Exam, after: Exam, questions: list[str], finished: Any, output: Path, recipe: Path, console) -> None:
    total = len(questions)
    console.print(
        f"\n{'':28}before  after\n"
        f"Loss on held-out answers    {before.loss:6.3f}  {after.loss:5.3f}\n"
        f"Replies in the right JSON   {before.valid:3}/{total}  {after.valid:2}/{total}\n"
    )
    for question, earlier, later in list(zip(questions, before.replies, after.replies))[:: max(1, total // 3)]:
        console.print(f"  {question}\n    before  {_short(earlier)}\n    after   {_short(later)}")
    folder, command, state = shlex.quote(shown(output)), this_command(), output / "run" / "steps"
    console.print(
        "It has learned a form, not facts: where it was wrong before, it is wrong in JSON now.\n"
        f"\nModel   {folder}   (a Hugging Face folder: from_pretrained({shown(output)!r}))\n"
        f"Report  {finished.report}\n"
        f"State   {state}: {_gigabytes(state):.1f} GB, only needed to continue this run; delete it to save space\n"
        f"Took    {duration(time.perf_counter() - process_started())}\n\n"
        "Next\n"
        f'  {command} predict {folder} "Which planet is the largest?"\n'
        f"  {command} finetune llm -c {shlex.quote(str(recipe))} dataset.path=my_chats.jsonl "
        "checkpoint.checkpoint_dir=./mine\n"
        f"  {command} examples cp chat_sft"
    )


def _short(reply: str) -> str:
    return reply if len(reply) <= WIDTH else reply[: WIDTH - 1] + "…"


def _gigabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e9
