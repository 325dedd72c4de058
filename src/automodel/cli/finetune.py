"""`automodel finetune llm -c run.yaml [section.key=value …]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from automodel.cli.options import collect_overrides
from automodel.config.errors import UserError


class Kinds(TyperGroup):
    """`finetune` takes the kind of model first, as the reference does; whoever leaves it out is told."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] in ("-c", "--config"):
            raise UserError(f"the kind of model comes first: automodel finetune llm {' '.join(args)}")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise UserError(f"`automodel finetune {args[0]}` is not known. Write `automodel finetune llm -c run.yaml`.")
        return super().resolve_command(ctx, args)


app = typer.Typer(no_args_is_help=True, help="Fine-tune a model from a YAML file.", cls=Kinds)

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
    if not dry_run:
        from automodel.engine.gpu_context import open_gpu_context
        from automodel.plan.kernels_ahead import compile_kernels_ahead

        open_gpu_context()
        compile_kernels_ahead(cfg)
    from automodel.models.lean_imports import import_transformers

    import_transformers()
    from automodel.engine.run import dry_run as print_only
    from automodel.engine.run import finetune as run_finetune

    if dry_run:
        print_only(cfg, trust=trust or [])
        return
    outcome = run_finetune(cfg, resume=resume, overwrite=overwrite, trust=trust or [])
    raise typer.Exit(outcome.exit_code)
