"""`${NAME}` and `${NAME,default}` in any value, filled from the environment.

What is filled in is always a scalar, never YAML: a variable cannot add keys. It counts as unquoted text, so
`${BATCH,8}` is a number where a number is wanted. `$${` is a literal `${`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping as Dict

from automodel.config.complaints import Complaints
from automodel.config.tree import Listing, Mapping, Node, Scalar

_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
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
    elif "${" in node.text:
        _fill_scalar(node, path, environment, complaints)


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
            f"the environment has no variable {name}. Set it (`export {name}=…`), or give a default: "
            f"`${{{name},default}}`."
        )

    if _REFERENCE.sub("", scalar.text) == "" and not scalar.text.startswith("$$"):
        scalar.plain = True  # the whole value is a variable
    scalar.text = _REFERENCE.sub(replace, scalar.text)
