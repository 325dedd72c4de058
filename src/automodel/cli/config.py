"""`automodel config validate | show | schema`: look at a config without running it."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from automodel.cli.options import TAKES_SETTINGS, Files, RemoteData, Trust, allowed, files_and_settings

app = typer.Typer(no_args_is_help=True, help="Validate, show and describe config files.")


@app.command("validate", context_settings=TAKES_SETTINGS)
def validate(
    context: typer.Context, config: Files = None, trust: Trust = None, allow_remote_data: RemoteData = False
) -> None:
    """Report everything that is wrong with a config, or say that it is fine."""
    from automodel.plan.check import load_run_config, not_yet
    from automodel.plan.run_place import check_run_place

    config, settings = files_and_settings(config, context.args, "config validate")
    cfg = load_run_config(config, settings, allowed(trust, allow_remote_data))
    check_run_place(cfg)
    later = not_yet(cfg)
    print(f"ok: {' + '.join(map(str, config))} is a valid config")
    for problem in later:
        print(f"  not yet: {problem}")
    if later:
        print("  `automodel finetune` refuses these keys until they are built.")


@app.command("show", context_settings=TAKES_SETTINGS)
def show(
    context: typer.Context, config: Files = None, trust: Trust = None, allow_remote_data: RemoteData = False
) -> None:
    """Print the config as a run would use it: files layered, settings applied, defaults filled in."""
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
