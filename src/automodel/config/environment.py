"""`${NAME}` and `${NAME,default}` in any value, filled from the environment.

What is filled in is always a scalar, never YAML: a variable cannot add keys. It counts as unquoted text, so
`${BATCH,8}` is a number where a number is wanted. `$${` is a literal `${`. The scalar keeps what was typed, which is
what is written wherever the value would be (written.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping as Dict
from typing import Any

from automodel.config.complaints import Complaints
from automodel.config.errors import UserError
from automodel.config.tree import COMMAND_LINE, Listing, Mapping, Node, Place, Scalar, plain_value
from automodel.config.written import HIDDEN, REFERENCE, variables_in

_INSIDE = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*(?:,(.*))?$", re.DOTALL)


def fill(node: Node, complaints: Complaints, path: str = "", environment: Dict[str, str] = os.environ) -> None:
    """Fills every reference under `node`, in place."""
    prefix = f"{path}." if path else ""
    if isinstance(node, Listing):
        for index, item in enumerate(node.items):
            fill(item, complaints, f"{prefix}{index}", environment)
    elif isinstance(node, Mapping):
        for name, entry in node.entries.items():
            fill(entry.node, complaints, path if name == "extra" else f"{prefix}{entry.key}", environment)
    else:
        if "${" in node.text:
            _fill_scalar(node, path, environment, complaints)
        if HIDDEN in node.text and node.place.name != COMMAND_LINE:
            complaints.add(
                node.place,
                path,
                "holds a secret, which is not kept in this file. Write `${NAME}` here and set that variable, or give "
                f"it on the command line: '{path}=${{NAME}}'.",
            )


def _fill_scalar(scalar: Scalar, path: str, environment: Dict[str, str], complaints: Complaints) -> None:
    def complain(message: str) -> str:
        complaints.add(scalar.place, path, message)
        return ""

    def replace(found: re.Match[str]) -> str:
        if found[0] == "$${":
            return "${"
        inside = _INSIDE.match(found[1])
        if inside is None or not found[0].endswith("}"):
            return complain(f"`{found[0]}` is not a variable; write `${{NAME}}` or `${{NAME,default}}`.")
        name, default = inside[1], inside[2]
        if name in environment:
            return environment[name]
        if default is not None:
            return default.strip()
        return complain(
            f"the environment has no variable {name}. Set it (`export {name}=…`), or write a default behind its name, "
            "as in `${NAME,default}`."
        )

    if REFERENCE.sub("", scalar.text) == "" and not scalar.text.startswith("$$"):
        scalar.plain = True  # the whole value is a variable
    if variables_in(scalar.text):
        scalar.typed = scalar.text
    scalar.text = REFERENCE.sub(replace, scalar.text)


def filled(text: str, environment: Dict[str, str] = os.environ) -> str | None:
    """A text of a run's own config with its variables filled in; None where one is not set."""
    complaints = Complaints()
    scalar = Scalar(text, plain=False, place=Place(0, 0, COMMAND_LINE))
    fill(scalar, complaints, environment=environment)
    return None if len(complaints) else scalar.text


def filled_tree(tree: Any, file: str) -> Any:
    """What a file of a run has of its config, with variables filled in. Raises `UserError` where one is not set."""
    if isinstance(tree, dict):
        return {key: filled_tree(value, file) for key, value in tree.items()}
    if isinstance(tree, list):
        return [filled_tree(value, file) for value in tree]
    if not isinstance(tree, str) or "${" not in tree:
        return tree
    text = filled(tree)
    if text is None:
        missing = ", ".join(name for name in variables_in(tree) if name not in os.environ)
        raise UserError(
            f"{file} refers to {tree}, and the environment has no variable {missing}. Set it and try again."
        )
    return plain_value(text) if variables_in(tree) else text
