"""`automodel evaluate RUN`: measure a fine-tuned model on held-out data."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from automodel.cli.options import TAKES_SETTINGS, RemoteData, Trust, allowed, collect_overrides
from automodel.cli.predict import Progress
from automodel.config.errors import UserError

if TYPE_CHECKING:
    from automodel.engine.assess import Assessment

app = typer.Typer(help="Measure a fine-tuned model on a dataset.")

GAP = 2  # characters between two columns of a table
MOST_CLASSES = 12  # a larger confusion matrix does not fit a terminal; --json has it


@app.command("evaluate", context_settings=TAKES_SETTINGS, no_args_is_help=True)
def evaluate(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or any Hugging Face model folder.")],
    config: Annotated[
        list[Path] | None, typer.Option("--config", "-c", help="YAML file layered over the run's own config.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="Data to measure on instead of the run's validation_dataset.")
    ] = None,
    split: Annotated[str | None, typer.Option("--split", help="Split, e.g. test or test[:1000].")] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Let a language model answer, and count exact matches and F1.")
    ] = False,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Rows that --generate asks; all by default.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest generated answer; 64 by default.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the result as a .json file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    trust: Trust = None,
    allow_remote_data: RemoteData = False,
) -> None:
    """Measure a fine-tuned model, with the metrics of its training.

    The run's validation_dataset is used, prepared as in training. Any key can be overridden:
    validation_dataloader.batch_size=64. Language models are measured by loss, perplexity and token accuracy; with
    --generate they also answer the prompts, and exact_match and f1 compare the answers with the right ones.
    """
    if run.startswith("-"):
        raise UserError(f"the run folder comes first: automodel evaluate RUN {shlex.quote(run)} …")
    settings = collect_overrides(context.args, measures=True)
    for flag, value in (("--max-samples", max_samples), ("--max-new-tokens", max_new_tokens)):
        if value is not None and not generate:
            raise UserError(f"{flag} is about generated answers; give --generate too.")
    if output is not None and (output.suffix != ".json" or not output.parent.is_dir() or output.is_dir()):
        raise UserError(f"--output: '{output}' must be a .json file in a folder that exists.")
    from automodel.engine.gpu_context import open_gpu_context
    from automodel.models.lean_imports import import_transformers

    open_gpu_context()
    import_transformers()
    from automodel.engine.assess import assess
    from automodel.engine.questions import Generating

    trusted = allowed(trust, allow_remote_data)
    with Progress("Generating") as progress:
        found = assess(
            run, files=config or [], settings=settings, dataset=dataset, split=split, trust=trusted,
            generating=Generating(max_samples, max_new_tokens or 64) if generate else None, on_progress=progress.update,
        )  # fmt: skip
    text = json.dumps(found.to_json(), indent=2)
    if output is not None:
        from automodel.checkpoint.disk import replace_text

        replace_text(output, text + "\n")
    if as_json:
        print(text)
    else:
        _print(found)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    if output is not None:
        print(f"Wrote {output}", file=sys.stderr)


def _print(found: Assessment) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    stats = found.data.stats
    where = found.dataset + (f" ({found.split})" if found.split else "")
    details = [f"{stats.used:,} examples"]
    details += [f"{stats.skipped:,} rows skipped"] if stats.skipped else []
    if found.asked is not None:
        details.append(f"{found.asked - found.unanswered:,} of {found.asked:,} prompts answered")
    beyond = "; the tags beyond are not measured" if found.task.rows.labels == "token" else ""
    details += [f"{cut.how_many} cut ({cut.why}{beyond})" for cut in stats.cuts]
    _say(console, f"{found.folder} on {where}: {', '.join(details)}, {found.precision} on {found.device}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="cyan")
    table.add_column(justify="right")
    for name, value in found.metrics.values.items():
        table.add_row(name, f"{value:.4f}")
    console.print(table)
    matrix = found.metrics.confusion_matrix
    if matrix and found.label_names:
        if len(matrix) <= MOST_CLASSES:
            _say(console, "\nConfusion matrix: true classes are rows, predicted ones columns")
            console.print(_confusion(matrix, found.label_names, console.width))
        else:
            _say(console, f"The confusion matrix of {len(matrix)} classes is in --json.")


def _say(console: Any, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def shortened(names: list[str], room: int) -> list[str] | None:
    """Names in at most `room` characters each, so that they stay different: by their beginnings, or by their ends.
    None where neither tells them apart."""
    for cut in (lambda name: name[: room - 1] + "…", lambda name: "…" + name[1 - room :]):
        heads = [name if len(name) <= room else cut(name) for name in names]
        if room > 1 and len(set(heads)) == len(heads):
            return heads
    return None


def _confusion(matrix: list[list[int]], names: list[str], width: int) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    first = min(max(map(len, names)), width // 3)
    heads = shortened(names, (width - first) // len(names) - GAP)
    if heads is None:  # rows have the numbers of the columns
        heads, names = [str(i) for i in range(len(names))], [f"{i} {name}" for i, name in enumerate(names)]
    for head in heads:
        table.add_column(Text(head), justify="right", no_wrap=True)
    for i, row in enumerate(matrix):
        cells = [Text(f"{count:,}", style="bold" if i == j else "") for j, count in enumerate(row)]
        table.add_row(Text(names[i]), *cells)
    return table
