"""`automodel run train.py --epochs 3`: a script for Hugging Face's Trainer, unchanged, on this engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Run a script for HF Trainer, unchanged, on this engine.")


@app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(help="A Python script that uses transformers.Trainer.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script itself takes.")] = None,
    compare: Annotated[
        int, typer.Option(min=0, help="Time this many steps of stock Trainer first, on a copy of the model.")
    ] = 0,
) -> None:
    """Run a script with our Trainer in transformers' place; nothing in it has to be changed.

    At the end it says what was accelerated. Options for this command stand before the script.
    """
    import os

    from automodel.cli.options import is_config_file
    from automodel.config.errors import EXIT_FAILED, UserError

    if is_config_file(str(script)):
        raise UserError(f"{script} is no Python script. A config is trained by `automodel finetune -c {script}`.")
    from automodel.trainer.stand_in import run_script

    file = os.path.abspath(script)  # now: the script may change the folder
    try:
        run_script(script, arguments or [], compare)
    except UserError:
        raise
    except Exception as error:
        _print_as_python_would(error, file)
        raise typer.Exit(EXIT_FAILED) from None


def _print_as_python_would(error: Exception, file: str) -> None:
    """The traceback from the script's own first line on; the way there is ours and of no interest."""
    import traceback

    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename != file:
        place = place.tb_next
    traceback.print_exception(type(error), error, place or error.__traceback__)
