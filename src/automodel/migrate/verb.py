"""`migrate`: one file in, one config out, and a list of what did not come along."""

from __future__ import annotations

from pathlib import Path

from automodel.config.errors import ConfigError, UserError
from automodel.config.gate import REMOTE_DATA
from automodel.config.writable import require_writable
from automodel.migrate.document import Document
from automodel.plan.check import load_run_config


def read_source(path: Path) -> Document:
    """The file as a document, whichever kind it is. Raises `UserError` with every line that stands in the way."""
    if not path.is_file():
        raise UserError(f"automodel migrate: there is no file {path}.")
    if path.suffix == ".py":
        from automodel.migrate.script import migrate_script

        document = migrate_script(path)
    elif path.suffix == ".json" and _is_another_tools(path):
        from automodel.migrate.other_tools import migrate_yaml

        document = migrate_yaml(path)
    elif path.suffix in (".json", ".bin"):
        from automodel.migrate.saved import migrate_saved

        document = migrate_saved(path)
    elif path.suffix in (".yaml", ".yml"):
        from automodel.migrate.other_tools import migrate_yaml

        document = migrate_yaml(path)
    else:
        raise UserError(
            f"automodel migrate: {path} is neither a script (.py), saved arguments (.json, .bin) nor a YAML of another "
            "tool."
        )
    document.require()
    return document


def _is_another_tools(path: Path) -> bool:
    """Whether JSON is a file of LLaMA-Factory or Axolotl, which read it as they read YAML."""
    from automodel.config.foreign import tool_of
    from automodel.migrate.other_tools import read_yaml

    try:
        return tool_of(read_yaml(path), json=True) is not None
    except UserError:  # flat settings may have comments
        return False


def write_config(document: Document, output: Path, overwrite: bool = False) -> None:
    """Writes the YAML, and takes it back where it turns out not to be a valid config."""
    require_writable(output, "-o")
    if output.exists() and not overwrite:
        raise UserError(f"{output} exists already; give another name with -o, or --overwrite.")
    before = output.read_text(encoding="utf-8") if output.exists() else None
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(document.to_yaml(), encoding="utf-8")
    if document.holes():
        return  # half a config, to be filled in or layered with another
    try:
        load_run_config([output], trust=[REMOTE_DATA])  # that it needs the option is said
    except ConfigError as error:
        if before is None:
            output.unlink()
        else:
            output.write_text(before, encoding="utf-8")
        raise UserError(
            f"{document.source} asks for something that does not go together here; nothing was written.\n{error}"
        ) from error
