"""The base of every config section.

A section is a frozen standard dataclass in the room that uses it, with a one-line docstring under each field (it
becomes the description in the JSON Schema and in `docs/config.md`). Validation happens once, in `config/load.py`;
rooms receive a finished value and never see YAML.

Conventions the loader follows:

- `_target_` in the file is the field `target` here.
- `ALIASES` maps other accepted spellings to field names (`{"dataset_name": "path"}`).
- `SHORTHAND` names the field that a bare scalar sets (`model: bert-base-uncased`).
- `TARGETS` says which `_target_` values the slot takes; see `config/gate.py`.
- A field named `extra` collects unknown keys for the target's own signature; sections without it refuse them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of the config sections."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}
    ALIASES: ClassVar[dict[str, str]] = {}
    SHORTHAND: ClassVar[str | None] = None
