"""`automodel migrate train.py -o run.yaml`: a script, saved arguments or another tool's YAML as a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from automodel.config.holes import FILL_IN

app = typer.Typer(help="Turn a script or other tools' settings into a config file.")


@app.command("migrate")
def migrate(
    source: Annotated[
        Path,
        typer.Argument(help="A script for HF Trainer, training_args.json or .bin, or another tool's YAML."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The config to write.")] = Path("run.yaml"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Run the script and the config for some steps and compare their losses.")
    ] = False,
    steps: Annotated[int, typer.Option(min=2, help="Steps of --check.")] = 20,
) -> None:
    """Read settings without running anything, write the equivalent YAML, and list what it does not carry over.

    What a config cannot say is listed with its line, and then nothing is written. --check runs the script.
    """
    from automodel.migrate.verb import read_source, write_config

    document = read_source(source)
    write_config(document, output, overwrite)
    print(f"Wrote {output}.")
    if document.holes():
        print(f"Fill in, or give in another -c: {', '.join(document.holes())} (written as {FILL_IN}).")
    for title, notes in (("Done differently here:", document.differs), ("Not carried over:", document.left_out)):
        if notes:
            print(title)
            for note in notes:
                print(f"  {note}")
    if check:
        from automodel.trainer.check_migration import check_migration

        print(check_migration(source, output, steps))
