"""`automodel predict RUN "text" …`: ask a fine-tuned model, for a few texts or for a whole file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from automodel.cli.options import Trust
from automodel.config.errors import UserError

if TYPE_CHECKING:
    from automodel.engine.predict import Predictor
    from automodel.engine.tables import Questions

app = typer.Typer(help="Classify or complete text with a fine-tuned model.")

SHOWN_CLASSES = 5
WIDTH = 60  # characters of a text that are shown beside its prediction


@app.command("predict", no_args_is_help=True)
def predict(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or any Hugging Face model folder.")],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Texts; `-` reads one from each line of stdin.")
    ] = None,
    input_file: Annotated[
        str | None,
        typer.Option("--input", "-i", help="CSV, JSONL, …: columns are kept; .txt, `-` (stdin): a text on each line."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of --input, e.g. test[:100]; train by default.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write a .jsonl or .csv file.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --output where it exists.")] = False,
    text_column: Annotated[str | None, typer.Option(help="Column of --input that holds the text.")] = None,
    pair_column: Annotated[str | None, typer.Option(help="Column of --input that holds the second text.")] = None,
    pair: Annotated[list[str] | None, typer.Option("--pair", help="Second text of a pair, one for each text.")] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Multi-label: answer with the classes above this; 0.5 by default."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts at a time.")] = 32,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest generated text, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Above 0: draw tokens instead of taking the best.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this share.")] = None,
    num_beams: Annotated[int | None, typer.Option(min=1, help="Search with this many beams.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of drawn tokens; 42 by default.")] = None,
    system: Annotated[str | None, typer.Option(help="System message for chats that have none.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give prompts as they are, without any template.")] = False,
    on_bad_row: Annotated[
        Literal["error", "skip"], typer.Option(help="Empty texts: stop, or give them no prediction.")
    ] = "error",
    precision: Annotated[
        Literal["auto", "fp32", "bf16"],
        typer.Option(help="Of matrix products; auto: as the run asks, or what is fastest on this machine."),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    trust: Trust = None,
) -> None:
    """Classify, tag or complete texts with a fine-tuned model.

    Texts are prepared as in training: same length limit, template and prefix. Chat and instruction models are asked
    through their templates; --raw turns that off.
    """
    given = _texts(texts or [], input_file)
    _check_table(input_file, split, text_column, pair_column, pair)
    check_overwrite(output, input_file, overwrite)
    get_ready(output, input_file)
    from automodel.engine.predict import Predictor

    with Progress() as progress:
        predictor = Predictor(
            run,
            batch_size=batch_size,
            on_bad_row=on_bad_row,
            precision=precision,
            trust=trust or [],
            on_progress=progress.update,
        )
        generation = {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "num_beams": num_beams,
            "seed": seed, "system": system, "raw": raw or None,
        }  # fmt: skip
        asked = {name: value for name, value in generation.items() if value is not None}
        if asked and predictor.task.verb != "generate":
            flag = next(iter(asked)).replace("_", "-")
            raise UserError(f"--{flag} is for models that generate text; '{run}' holds a {predictor.task} model.")
        rows, questions = _questions(predictor, given, pair, (input_file, split), (text_column, pair_column, raw))
        answers = _ask(predictor, questions, asked, threshold)
    shown = (_shown(item, answer) for item, answer in zip(_asked(questions), answers))
    tell(predictor, rows, answers, output, as_json, shown)


def _check_table(
    input_file: str | None,
    split: str | None,
    text_column: str | None,
    pair_column: str | None,
    pair: list[str] | None,
) -> None:
    check_split(input_file, split)
    if input_file is None and (text_column or pair_column):
        raise UserError(f"--{'text' if text_column else 'pair'}-column names a column of --input, which is not given.")
    if input_file is not None and pair:
        raise UserError("--pair belongs to texts on the command line; for a file, name the column: --pair-column.")


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def check_split(input_file: str | None, split: str | None) -> None:
    if input_file is None and split is not None:
        raise UserError("--split chooses rows of --input, which is not given.")


def check_overwrite(output: Path | None, input_file: str | None, overwrite: bool) -> None:
    """A file that exists is replaced only where that is said; the input never is."""
    if overwrite and output is None:
        raise UserError("--overwrite is about the file that --output names, which is not given.")
    if output is None or overwrite or not output.is_file():
        return
    if input_file is None or not os.path.exists(input_file) or not os.path.samefile(output, input_file):
        raise UserError(f"--output: '{output}' exists. Name another file, or replace it with --overwrite.")


def get_ready(output: Path | None, input_file: str | None) -> None:
    """What takes long begins, and a file that cannot be written is found."""
    from automodel.engine.gpu_context import open_gpu_context
    from automodel.models.lean_imports import import_transformers

    open_gpu_context()
    import_transformers()
    from automodel.engine import tables

    if output is not None:
        tables.check_output(output, input_file)


def tell(
    predictor: Predictor, rows: Any, answers: list[Any], output: Path | None, as_json: bool, shown: Iterable[str]
) -> None:
    """Answers beside what was asked, into a file or as JSON; otherwise as they are shown to people."""
    from automodel.engine import tables

    done = tables.answered(rows, answers)
    if output is not None:
        tables.write_table(output, done)
    if as_json:
        shown = map(tables.json_line, done)
    if as_json or output is None:
        for line in shown:
            print(line)
    for text in predictor.notes:
        note(text)
    if output is not None:
        print(f"Wrote {len(done):,} rows to {output}", file=sys.stderr)


def _questions(
    predictor: Predictor,
    given: list[str],
    pair: list[str] | None,
    source: tuple[str | None, str | None],
    columns: tuple[str | None, str | None, bool],
) -> tuple[Any, Questions]:
    """The rows that answers are put beside, and what is asked."""
    from automodel.engine import tables

    input_file, split = source
    if input_file is not None:
        table = tables.read_table(input_file, split, note)
        return table, tables.questions_of(table, predictor, *columns)
    rows = [{"text": text} for text in given]
    if pair:
        rows = [{**row, "text_pair": second} for row, second in zip(rows, pair)]
    return rows, tables.Questions(given, pair or None)


def _texts(texts: list[str], input_file: str | None) -> list[str]:
    if input_file is not None:
        if texts:
            raise UserError("give texts or --input, not both.")
        return []
    if not texts:
        raise UserError('there is nothing to predict. Give texts ("…"), a file (--input FILE), or `-` for stdin.')
    if "-" not in texts:
        return texts
    if texts != ["-"]:
        raise UserError("`-` reads all texts from stdin; give no others beside it.")
    from automodel.engine.stdin import lines_of_stdin

    return lines_of_stdin()


def _ask(predictor: Predictor, questions: Any, generation: dict[str, Any], threshold: float | None) -> list[Any]:
    if predictor.task.verb == "classify":
        return predictor.classify(questions.items, questions.pairs, threshold)
    if threshold is not None:
        raise UserError(f"--threshold is for text classification; this is a {predictor.task} model.")
    if questions.pairs:
        raise UserError(f"--pair is for text classification; this is a {predictor.task} model.")
    if predictor.task.verb == "tag":
        return predictor.tag(questions.items)
    return predictor.generate(questions.items, **generation)


def _shown(item: Any, answer: Any) -> str:
    """A prediction for people."""
    from automodel.tasks.answers import Classification, Generation

    if answer is None:
        return f"(no prediction)  {_short(item)}"
    if isinstance(answer, Generation):
        return answer.prediction
    if not isinstance(answer, Classification):
        tagged = "  ".join(f"{word}/{tag or '?'}" for word, tag in zip(answer.words, answer.prediction))
        found = [f"  {e['type']}: {e['text']} ({e['score']:.3f})" for e in answer.entities or ()]
        return "\n".join([tagged, *found])
    if answer.scores is None:
        numbers = answer.prediction if isinstance(answer.prediction, list) else [answer.prediction]
        return f"{' '.join(f'{number:.4f}' for number in numbers)}  {_short(item)}"
    label = answer.prediction if isinstance(answer.prediction, str) else ", ".join(map(str, answer.prediction))
    ranked = sorted(answer.scores.items(), key=lambda pair: -pair[1])
    scores = ", ".join(f"{name} {score:.3f}" for name, score in ranked[:SHOWN_CLASSES])
    more = f", … {len(ranked) - SHOWN_CLASSES} more" if len(ranked) > SHOWN_CLASSES else ""
    return f"{label or '(none)'}  [{scores}{more}]  {_short(item)}"


def _asked(questions: Questions) -> list[Any]:
    """What is shown beside each answer: of a pair, both texts."""
    if questions.pairs is None:
        return questions.items
    half = (WIDTH - 3) // 2
    return [f"{_short(one, half)} | {_short(two, half)}" for one, two in zip(questions.items, questions.pairs)]


def _short(item: Any, width: int = WIDTH) -> str:
    text = " ".join((item if isinstance(item, str) else str(item)).split())
    return text if len(text) <= width else text[: width - 1] + "…"


class Progress:
    """A bar on the terminal for long inputs; nothing elsewhere, and nothing on stdout."""

    def __init__(self, doing: str = "Predicting") -> None:
        self._doing = doing
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def update(self, done: int, total: int) -> None:
        if not sys.stderr.isatty() or (self._bar is None and done >= total):
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._doing, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
