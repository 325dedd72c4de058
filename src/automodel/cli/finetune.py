"""`automodel finetune llm -c run.yaml [section.key=value …]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from automodel.cli.options import collect_overrides

app = typer.Typer(no_args_is_help=True, help="Fine-tune a model from a YAML file.")

Files = Annotated[list[Path], typer.Option("--config", "-c", help="YAML file; several are layered, later ones win.")]
Trust = Annotated[list[str] | None, typer.Option("--trust", help="Package whose names `_target_` may use.")]


@app.callback()
def finetune() -> None:
    """Fine-tune a model from a YAML file."""


@app.command("llm", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def llm(
    context: typer.Context,
    config: Files,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the run folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the run folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; load no weights, train nothing.")] = False,
    trust: Trust = None,
) -> None:
    """Fine-tune a language model or a text classifier.

    Any key can be overridden: optimizer.lr=1e-5 or --optimizer.lr 1e-5.
    """
    from automodel.plan.check import load_run_config

    cfg = load_run_config(config, collect_overrides(context.args), trust or [])
    from automodel.engine.run import dry_run as print_only
    from automodel.engine.run import finetune as run_finetune

    if dry_run:
        print_only(cfg, trust=trust or [])
        return
    outcome = run_finetune(cfg, resume=resume, overwrite=overwrite, trust=trust or [])
    raise typer.Exit(outcome.exit_code)
