"""Whether the variables of a run's config still have the values that the run began with.

`run/config.yaml` has `${NAME}` where that was typed, and no file of the run has the value. A run that goes on must see
the same values all the same: `seed: ${SEED}` is another experiment under another `SEED`. So the run keeps a digest of
each value (`run/variables.json`), made slow and with a salt of its own, from which a value cannot be read.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from automodel.config.dump import to_plain
from automodel.config.environment import filled
from automodel.config.section import Typed
from automodel.config.tree import plain_value
from automodel.plan.config import RunConfig

VARIABLES = "variables.json"
ROUNDS = 100_000  # of the digest: a few hundredths of a second


def noted_variables(cfg: RunConfig) -> dict[str, Any]:
    """What the run keeps of the values that came from the environment."""
    salt = secrets.token_hex(16)
    return {
        "salt": salt,
        "values": {path: _digest(_as_read_back(typed), path, salt) for path, typed in cfg.typed.items()},
    }


def _as_read_back(typed: Typed) -> Any:
    """The value that the text in `run/config.yaml` will have: a path in front of which a folder was put is the same
    place, but another text (`/data/./reviews.csv`)."""
    value = _filled(typed.text)
    return typed.value if value is None else value


def as_begun(tree: dict[str, Any], cfg: RunConfig, noted: dict[str, Any] | None) -> dict[str, Any]:
    """The tree of a run's own config with the values that its variables had: those of the environment, or of the same
    key in the config that goes on, where they are the same. A value that is neither stays `${NAME}`."""
    known, salt = (noted or {}).get("values") or {}, (noted or {}).get("salt", "")
    now = _by_path(to_plain(cfg, filled=True))

    def begun(value: Any, path: str) -> Any:
        here = _filled(value)
        if path not in known or (here is not None and _digest(here, path, salt) == known[path]):
            return value if here is None else here
        return now[path] if path in now and _digest(now[path], path, salt) == known[path] else value

    return _changed(tree, begun, "", set(known))


def _changed(node: Any, change: Any, path: str, whole: set[str]) -> Any:
    """The tree with `change(value, path)` for every leaf, and for lists and mappings that are one value (`whole`)."""
    if path not in whole and isinstance(node, dict):
        return {key: _changed(value, change, _inner(path, key), whole) for key, value in node.items()}
    if path not in whole and isinstance(node, list):
        return [_changed(value, change, _inner(path, number), whole) for number, value in enumerate(node)]
    return change(node, path)


def _by_path(node: Any, path: str = "") -> dict[str, Any]:
    """Every value of a tree, lists and mappings among them."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    found = {path: node}
    for key, value in inner:
        found |= _by_path(value, _inner(path, key))
    return found


def _inner(path: str, key: Any) -> str:
    """The path in field names, which is `target` for `_target_`."""
    return f"{path}.{'target' if key == '_target_' else key}".removeprefix(".")


def _filled(value: Any) -> Any:
    """A value of a file with its variables filled in; None where one is not set."""
    if isinstance(value, dict):
        parts = {key: _filled(item) for key, item in value.items()}
        return None if any(parts[key] is None and item is not None for key, item in value.items()) else parts
    if isinstance(value, list):
        items = [_filled(item) for item in value]
        return None if any(new is None and old is not None for new, old in zip(items, value)) else items
    if not isinstance(value, str) or "${" not in value.replace("$${", ""):
        return value
    text = filled(value)
    return None if text is None else plain_value(text)


def _digest(value: Any, path: str, salt: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", f"{path}={_canonical(value)}".encode(), salt.encode(), ROUNDS).hex()


def _canonical(value: Any) -> str:
    """The same text for a value however it was read: `8`, 8 and 8.0 are one number."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_canonical, value)) + "]"
    value = plain_value(value) if isinstance(value, str) else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{float(value):.17g}" if is_number else str(value)
