"""`automodel config validate | show | schema`: look at a config without running it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from automodel.cli.options import TAKES_SETTINGS, Files, RemoteData, Trust, allowed, files_and_settings
from automodel.config.errors import UserError
from automodel.config.written import as_written

if TYPE_CHECKING:
    from automodel.plan.config import RunConfig

app = typer.Typer(no_args_is_help=True, help="Validate, show and describe config files.")


@app.command("validate", context_settings=TAKES_SETTINGS)
def validate(
    context: typer.Context,
    config: Files = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also read the model's config, the tokenizer and the data, as `plan` does.")
    ] = False,
    trust: Trust = None,
    allow_remote_data: RemoteData = False,
) -> None:
    """Report everything that is wrong with a config, or say that it is fine and what was not looked at."""
    from automodel.plan.check import load_run_config, not_yet
    from automodel.plan.run_place import check_run_place

    config, settings = files_and_settings(config, context.args, "config validate")
    trusted = allowed(trust, allow_remote_data)
    cfg = load_run_config(config, settings, trusted)
    check_run_place(cfg)
    later = not_yet(cfg)
    deeper = _looked_at(cfg, trusted) if deep and not later else _not_looked_at(cfg)
    print(f"ok: {' + '.join(map(str, config))} is a valid config")
    for problem in later:
        print(f"  not yet: {problem}")
    if later:
        print("  `automodel finetune` refuses these keys until they are built.")
    print(f"  {as_written(deeper)}")


def _not_looked_at(cfg: RunConfig) -> str:
    model = cfg.model.pretrained_model_name_or_path
    sections = [section for section in (cfg.dataset, cfg.validation_dataset) if section is not None]
    parts = [part for section in sections for part in (section.mixture or (section,))]
    data = [part.path or getattr(part, "target", None) for part in parts]
    named = dict.fromkeys(name for name in (model, cfg.model.tokenizer, *data) if name)
    return f"not looked at: {', '.join(named)}, and whether it fits in memory. `--deep` looks."


def _looked_at(cfg: RunConfig, trusted: list[str]) -> str:
    """Reads everything but weights. Raises `UserError` with what is wrong there."""
    from automodel.distributed import visible
    from automodel.distributed.world import world_of_environment
    from automodel.models.lean_imports import import_transformers
    from automodel.plan.ranks import choose_ranks

    chosen = choose_ranks(cfg, None, world_of_environment(), visible.visible_gpus)
    import_transformers()
    from automodel.engine.unasked_ranks import planned

    prepared = planned(cfg, trusted, chosen)
    if prepared.plan.cannot_fit:
        raise UserError(prepared.plan.cannot_fit)
    rows = [f"{prepared.train.stats.rows:,} rows of dataset"]
    if prepared.validation is not None:
        rows.append(f"{prepared.validation.stats.rows:,} of validation_dataset")
    return f"looked at: the model's config, the tokenizer, {' and '.join(rows)}. Not at the weights."


@app.command("show", context_settings=TAKES_SETTINGS)
def show(
    context: typer.Context, config: Files = None, trust: Trust = None, allow_remote_data: RemoteData = False
) -> None:
    """Print the config as a run would use it: files layered, settings applied, defaults filled in.

    Variables stay `${NAME}`, and secrets are hidden.
    """
    from automodel.config.load import dump_config
    from automodel.plan.check import load_run_config

    config, settings = files_and_settings(config, context.args, "config show")
    text = dump_config(load_run_config(config, settings, allowed(trust, allow_remote_data)))
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        Console().print(Syntax(text, "yaml", background_color="default"))
    else:
        print(text, end="")


@app.command("schema")
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference page instead.")] = False,
) -> None:
    """Print the JSON Schema of a config file, for editors."""
    from automodel.config.schema import json_schema
    from automodel.config.schema import markdown as page
    from automodel.plan.config import RunConfig

    print(page(RunConfig) if markdown else json.dumps(json_schema(RunConfig), indent=2), end="" if markdown else "\n")
