"""`automodel generate RUN --prompt "…"`: let a language model write, for one prompt or for a whole file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from automodel.cli.options import Trust
from automodel.cli.predict import Progress, check_overwrite, check_split, get_ready, note, tell
from automodel.config.errors import UserError

if TYPE_CHECKING:
    from automodel.engine.predict import Predictor

app = typer.Typer(help="Let a fine-tuned language model write.")


@app.command("generate", no_args_is_help=True)
def generate(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN_OR_MODEL", help="Run folder, Hugging Face folder, or a hub model in the cache."),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="What to answer or continue; may be given several times.")
    ] = None,
    input_file: Annotated[
        str | None,
        typer.Option(
            "--input", "-i", help="JSONL, CSV, …: columns are kept; .txt, `-` (stdin): a prompt on each line."
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of --input, e.g. test[:100]; train by default.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write a .jsonl or .csv file.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --output where it exists.")] = False,
    text_column: Annotated[str | None, typer.Option(help="Column of --input that holds the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="Above 0: draw tokens instead of taking the likeliest.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this share.")] = None,
    num_beams: Annotated[int, typer.Option(min=1, help="Search with this many beams.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of drawn tokens.")] = 42,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 32,
    system: Annotated[str | None, typer.Option(help="System message for chats that have none.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give prompts as they are, without any template.")] = False,
    on_bad_row: Annotated[
        Literal["error", "skip"], typer.Option(help="Prompts that cannot be used: stop, or leave them unanswered.")
    ] = "error",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    trust: Trust = None,
) -> None:
    """Let a language model answer or continue prompts.

    Prompts are written as in training: through the chat template, the run's prompt_template or its instruction layout.
    Similar lengths share a batch; an answer ends where the model ends it. One prompt is answered while you watch.
    """
    _check(run, prompt, input_file, output, overwrite, text_column, split)
    get_ready(output, input_file)
    from automodel.engine.predict import Predictor
    from automodel.engine.prompts import prompt_writer

    with Progress("Generating") as progress:
        predictor = Predictor(
            run, batch_size=batch_size, on_bad_row=on_bad_row, trust=trust or [], on_progress=progress.update
        )
        if not predictor.task.head.next_token:
            raise UserError(
                f"'{run}' holds a {predictor.task} model, and `generate` is for causal language models. Use: "
                f"automodel predict {shlex.quote(str(run))} …"
            )
        rows, items = _prompts(predictor, prompt or [], (input_file, split), text_column, raw)
        watched = len(items) == 1 and input_file is None and num_beams == 1 and not as_json and output is None
        writer = prompt_writer(predictor.saved, raw=raw, system=system)
        answers = predictor.generate(
            items, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, num_beams=num_beams, seed=seed,
            system=system, raw=raw, on_text=_Printer(keep=writer.continues) if watched else None,
        )  # fmt: skip
    shown = [""] if watched else ("(no answer)" if answer is None else answer.prediction for answer in answers)
    tell(predictor, rows, answers, output, as_json, shown)


def _prompts(
    predictor: Predictor, given: list[str], source: tuple[str | None, str | None], text_column: str | None, raw: bool
) -> tuple[Any, list[Any]]:
    """The rows that answers are put beside, and the prompts."""
    input_file, split = source
    if input_file is None:
        return [{"prompt": text} for text in given], given
    from automodel.engine import tables

    rows = tables.read_table(input_file, split, note)
    return rows, tables.questions_of(rows, predictor, text_column, None, raw).items


def _check(
    run: str,
    prompts: list[str] | None,
    input_file: str | None,
    output: Path | None,
    overwrite: bool,
    text_column: str | None,
    split: str | None,
) -> None:
    """What can be told from the arguments alone."""
    if run.startswith("-"):
        raise UserError(f"the run folder comes first: automodel generate RUN {shlex.quote(run)} …")
    if bool(prompts) == (input_file is not None):
        raise UserError("give either prompts (--prompt TEXT) or a file of them (--input FILE).")
    if input_file is None and text_column:
        raise UserError("--text-column names a column of --input, which is not given.")
    check_split(input_file, split)
    check_overwrite(output, input_file, overwrite)


class _Printer:
    """Prints an answer piece by piece. White space before it is left out, as it is of finished answers; a text that is
    only continued keeps it."""

    def __init__(self, keep: bool):
        self.started = keep

    def __call__(self, text: str) -> None:
        if not self.started:
            text = text.lstrip()
            self.started = bool(text)
        print(text, end="", flush=True)
