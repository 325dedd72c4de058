"""`automodel data preview -c run.yaml`: see what a run will learn from, before it learns."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from automodel.cli.options import TAKES_SETTINGS, Files, RemoteData, Trust, allowed, files_and_settings
from automodel.metrics.waiting import telling


class Split(StrEnum):
    """Parts of the data."""

    train = "train"
    validation = "validation"


app = typer.Typer(no_args_is_help=True, help="Look at the data of a run.")


@app.callback()
def data() -> None:
    """Look at the data of a run."""


@app.command("preview", context_settings=TAKES_SETTINGS)
def preview(
    context: typer.Context,
    config: Files = None,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Samples to show.")] = 3,
    split: Annotated[Split, typer.Option("--split", help="Which part of the data.")] = Split.train,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    trust: Trust = None,
    allow_remote_data: RemoteData = False,
) -> None:
    """Show samples with what is learned of them in colour, lengths, what is cut, and how full batches are.

    The data is read, checked and tokenised exactly as `finetune` does it. No weights are loaded.
    """
    from automodel.plan.check import load_run_config

    config, settings = files_and_settings(config, context.args, "data preview")
    trusted = allowed(trust, allow_remote_data)
    cfg = load_run_config(config, settings, trusted)
    with telling("Reading the data"):
        from automodel.models.lean_imports import import_transformers

        import_transformers()
        from automodel.engine.preview import preview as look

        seen = look(cfg, split=split.value, samples=samples, trust=trusted)
    if as_json:
        print(json.dumps(seen.to_json(), indent=2, ensure_ascii=False))
        return
    from automodel.cli.preview_page import print_preview

    print_preview(seen)
