"""`automodel quickstart`: a real model fine-tuned on real reviews, in minutes, on whatever machine this is.

Nothing here is special: it writes two CSV files and a short YAML into the output folder and hands the YAML to the same
`finetune` that every run goes through. What it adds is a choice (which reviews, how many, at which learning rate;
docs/log.md has what was tried) and words for someone who sees the program for the first time.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from automodel.config.errors import UserError
from automodel.engine.closing import process_started, shown, this_command
from automodel.metrics.progress import duration

app = typer.Typer(help="Fine-tune a real model on real reviews, in minutes.")

LEAST_REVIEWS = 32
SENTENCES = (
    "A warm, funny film with a lot of heart; I left the cinema smiling.",
    "Two dull hours: the plot makes no sense and nobody seems to care.",
)

RECIPE = """\
# The quickstart: MiniLM learns to tell good reviews from bad ones. Change anything and run it again:
#   automodel finetune llm -c {yaml} checkpoint.checkpoint_dir=./another
model:
  pretrained_model_name_or_path: {model}
  # Every review is seen once, so there is nothing for dropout to prevent, and with it a step takes a fifth longer.
  hidden_dropout_prob: 0.0
  attention_probs_dropout_prob: 0.0
task: text-classification

dataset:
  path: {train}        # text,label
  max_length: 256      # nothing is cut: reviews of up to {words} words have at most 230 tokens
validation_dataset:
  path: {held_out}

step_scheduler:
  num_epochs: 1
  log_every_steps: 10
dataloader:
  batch_size: 16
optimizer:
  lr: 1.0e-4
  weight_decay: 0.01
lr_scheduler:
  name: linear
  warmup_ratio: 0.1
checkpoint:
  checkpoint_dir: {output}
"""


@app.command("quickstart")
def quickstart(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Run folder. [default: ./quickstart or ./quickstart-chat]")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=1, max=60, help="Time to aim for: how much is learned follows it.")
    ] = 4.0,
    task: Annotated[
        Literal["reviews", "chat"],
        typer.Option(help="A classifier of film reviews, or a chat model that learns to answer in JSON."),
    ] = "reviews",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the output folder.")] = False,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Examples to learn from, instead of as many as fit into --minutes.")
    ] = None,
    held_out: Annotated[
        int | None,
        typer.Option(min=2, help="Reviews to measure on; half of them positive. [default: 250 a minute, at most 1000]"),
    ] = None,
) -> None:
    """Fine-tune a real pretrained model on real data and see that it works.

    Everything comes from PyPI packages; no account and no model hub is needed. The default takes two to four minutes
    on two idle CPU cores and ends with a classifier, its accuracy on reviews it has never seen, and a report.
    """
    # Threads that wait by spinning take the cores away from each other when anything else runs on this machine: a step
    # took 0.6 s or 3.5 s. It has to be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if task == "chat":
        from automodel.cli.quickstart_chat import run_chat

        if held_out is not None:
            raise UserError("--held-out belongs to the reviews; the chat example has its own 16 held-out questions.")
        raise typer.Exit(run_chat(output or Path("quickstart-chat"), minutes, samples, overwrite))
    raise typer.Exit(run_reviews(output or Path("quickstart"), minutes, samples, held_out, overwrite))


def run_reviews(output: Path, minutes: float, samples: int | None, held_out: int | None, overwrite: bool) -> int:
    """The whole of it; returns the exit code."""
    from automodel.cli.demo import budget, reviews

    held_out = held_out or budget.held_out_for(minutes)
    _check_counts(samples, held_out)
    from automodel.engine.folder import open_folder

    open_folder(str(output), resume=False, overwrite=overwrite)  # before anything is written into it
    console = plain_console()
    reviews.fetch(console.print)
    count = samples or _count_for(minutes, held_out, console)
    train, kept_back = reviews.split(count, held_out)
    console.print(
        f"Fine-tuning MiniLM (22.7M parameters) on {len(train):,} film reviews from IMDB; {len(kept_back):,} others "
        f"are held out.\nWhole reviews of up to {reviews.MOST_WORDS} words, half of them positive, no text twice.\n"
    )
    data = output.absolute() / "data"
    reviews.write_csv(train, data / "train.csv")
    reviews.write_csv(kept_back, data / "held_out.csv")
    recipe = output / "quickstart.yaml"
    text = RECIPE.format(
        yaml=in_a_comment(recipe),
        model=yaml_text(reviews.model_folder()),
        train=yaml_text(data / "train.csv"),
        held_out=yaml_text(data / "held_out.csv"),
        words=reviews.MOST_WORDS,
        output=yaml_text(output),
    )
    recipe.write_text(text, encoding="utf-8")
    finished = finetune_file(recipe, overwrite, console)
    if finished.exit_code == 0:
        _tell(finished, len(kept_back), output, recipe, console)
    else:
        console.print(f"Continue with:  automodel finetune llm -c {shlex.quote(str(recipe))} --resume")
    return finished.exit_code


def _check_counts(samples: int | None, held_out: int) -> None:
    if samples is not None and (samples < LEAST_REVIEWS or samples % 2):
        raise UserError(
            f"--samples must be an even number of {LEAST_REVIEWS} or more, half of each kind; got {samples}."
        )
    if held_out % 2:
        raise UserError(f"--held-out must be an even number, half of each kind; got {held_out}.")


def _count_for(minutes: float, held_out: int, console: Any) -> int:
    from automodel.cli.demo import budget

    speed = budget.matrix_flops()
    full = budget.reviews_for(minutes, held_out, _most(held_out), None)
    count = budget.reviews_for(minutes, held_out, _most(held_out), speed)
    if speed is None:
        return count
    takes = budget.minutes_for(count, held_out, speed)
    machine = f"This machine multiplies at {speed / 1e9:,.0f} GFLOP/s just now"
    if takes > 1.1 * minutes:
        console.print(
            f"{machine}, so this will take about {takes:.2g} minutes and not {minutes:g}: {count:,} reviews are the "
            "fewest that teach it enough."
        )
    elif count < full:
        console.print(
            f"{machine}, so {count:,} reviews are used instead of {full:,}, to stay within {minutes:g} minutes. "
            f"`--samples {full}` uses them all."
        )
    return count


def _most(held_out: int) -> int:
    return 4_900 - held_out  # short reviews there are, in pairs


def finetune_file(recipe: Path, overwrite: bool, console: Any) -> Any:
    """What `automodel finetune llm -c recipe` does."""
    from automodel.engine.gpu_context import open_gpu_context
    from automodel.models.lean_imports import import_transformers
    from automodel.plan.check import load_run_config
    from automodel.plan.kernels_ahead import compile_kernels_ahead

    cfg = load_run_config([recipe])
    open_gpu_context()
    compile_kernels_ahead(cfg)
    import_transformers()
    from automodel.engine.run import finetune

    # The quickstart has last lines of its own.
    return finetune(cfg, overwrite=overwrite, console=console, started=process_started(), tells_next=False)


def _tell(finished: Any, held_out: int, output: Path, recipe: Path, console: Any) -> None:
    from automodel.engine.predict import Predictor

    accuracy = finished.summary["validation"]["accuracy"]
    answers = Predictor(finished.folder).classify(SENTENCES)
    console.print(
        f"\nHeld-out accuracy: {accuracy:.3f} — {round(accuracy * held_out):,} of {held_out:,} reviews it had never "
        "seen (guessing: 0.500)\n\nTwo sentences of our own:"
    )
    for sentence, answer in zip(SENTENCES, answers):
        assert answer is not None
        scores = ", ".join(f"{name} {score:.3f}" for name, score in (answer.scores or {}).items())
        console.print(f"  {answer.prediction}  ({scores})  “{sentence}”")
    folder, command = shlex.quote(shown(output)), this_command()
    console.print(
        f"\nModel   {folder}   (a Hugging Face folder: from_pretrained({shown(output)!r}))\n"
        f"Report  {finished.report}\n"
        f"Took    {duration(time.perf_counter() - process_started())}\n\n"
        "Next\n"
        f'  {command} predict {folder} "I could not stop laughing."\n'
        f"  {command} finetune llm -c {shlex.quote(str(recipe))} optimizer.lr=5e-5 "
        f"checkpoint.checkpoint_dir=./second\n"
        f"  {command} examples ls        configs for your own data\n"
        f"  {command} quickstart --task chat"
    )


def plain_console() -> Any:
    """A console that leaves text as it is: no markup, no colours for numbers, no wrapping."""
    from rich.console import Console

    return Console(markup=False, highlight=False, soft_wrap=True)


def in_a_comment(path: Path) -> str:
    """A path in a command that a comment shows: on one line, whatever its name."""
    return "".join(c if c.isprintable() else "?" for c in shlex.quote(str(path)))


def yaml_text(value: object) -> str:
    """A path as a YAML scalar; JSON's quoting is YAML's too, and `$$` is a dollar that is no variable."""
    return json.dumps(str(value), ensure_ascii=False).replace("${", "$${")
