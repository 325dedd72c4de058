"""The base of every config section.

A section is a frozen standard dataclass in the room that uses it, with a one-line docstring under each field (it
becomes the description in the JSON Schema and in `docs/config.md`). Validation happens once, in `config/load.py`;
rooms receive a finished value and never see YAML.

Conventions the loader follows:

- `_target_` in the file is the field `target` here.
- `ALIASES` maps other accepted spellings to field names (`{"dataset_name": "path"}`).
- `INLINE` names mappings whose keys are read as if they stood in the section itself (`lr_scheduler_kwargs`).
- `HOMES`, on the class of the whole file, maps keys that people write at the top level to where they belong.
- `SHORTHAND` names the field that a bare scalar sets (`model: bert-base-uncased`).
- `USUAL` has the values of keys that are left open (None), where a target may have others: single items of a list are
  set in these, and whoever writes them out is not told that the target has no such setting.
- `SLOT` names the gate's slot, which says what a `_target_` may be here; see `config/gate.py`.
- A field named `extra` collects unknown keys for the target's own signature; sections without it refuse them.
- `EXAMPLE`, on the class of the whole file, is shown where a required section is missing.
- Limits stand in the field's type (`batch_size: Count`), so the loader, the schema and the reference page agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, Lt

Count = Annotated[int, Ge(1)]
"""One or more."""
CountOrZero = Annotated[int, Ge(0)]
"""Zero or more."""
Positive = Annotated[float, Gt(0)]
"""Above zero."""
NonNegative = Annotated[float, Ge(0)]
"""Zero or above."""
Share = Annotated[float, Ge(0), Le(1)]
"""A part of a whole, both ends included."""
ShareBelowOne = Annotated[float, Ge(0), Lt(1)]
"""A part of a whole that may not be all of it (dropout, smoothing, Adam's betas)."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of the config sections."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}
    ALIASES: ClassVar[dict[str, str]] = {}
    INLINE: ClassVar[tuple[str, ...]] = ()
    HOMES: ClassVar[dict[str, str]] = {}
    SHORTHAND: ClassVar[str | None] = None
    USUAL: ClassVar[dict[str, Any]] = {}
    SLOT: ClassVar[str | None] = None
    EXAMPLE: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class Typed:
    """How a value was typed that has variables in it."""

    value: Any
    """The value with the variables filled in; another one in its place was not typed like this."""
    text: Any
    """As a file has it: `${NAME}`, or a list or mapping with such texts."""


@dataclass(frozen=True, kw_only=True)
class WholeFile(Section):
    """The section that is a whole file. It remembers which values were typed as `${NAME}`."""

    typed: Mapping[str, Typed] = field(default_factory=dict, repr=False, compare=False)
    """By the path of the key, in field names. No key of a file."""
