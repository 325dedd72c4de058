"""The base of every config section.

A section is a frozen standard dataclass in the room that uses it, with a one-line docstring under each field (it
becomes the description in the JSON Schema and in `docs/config.md`). Validation happens once, in `config/load.py`;
rooms receive a finished value and never see YAML.

Conventions the loader follows:

- `_target_` in the file is the field `target` here.
- `ALIASES` maps other accepted spellings to field names (`{"dataset_name": "path"}`).
- `INLINE` names mappings whose keys are read as if they stood in the section itself (`lr_scheduler_kwargs`).
- `HOMES`, on the class of the whole file, maps keys that people write at the top level to where they belong.
- `TWINS`, on the class of the whole file, lists keys that are two names of one setting. A later file, or the command
  line, that sets one of them takes the other away from the files before; two in one file are compared in
  `plan/check.py`.
- `SHORTHAND` names the field that a bare scalar sets (`model: bert-base-uncased`).
- `USUAL` has the values of keys that are left open (None), where a target may have others: single items of a list are
  set in these, and whoever writes them out is not told that the target has no such setting.
- `SLOT` names the gate's slot, which says what a `_target_` may be here; see `config/gate.py`.
- A field named `extra` collects unknown keys for the target's own signature; sections without it refuse them. `EXTRA`
  has the types of such keys, by a pattern of their names.
- `EXAMPLE`, on the class of the whole file, is shown where a required section is missing.
- Limits stand in the field's type (`batch_size: Count`), so the loader, the schema and the reference page agree. Every
  number has both ends: what no run can mean (`lr: 1e10`, 10²⁶ steps) is refused when the config is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, Lt

MOST = 10**9  # steps, rows, tokens: more of anything is a typing error

Count = Annotated[int, Ge(1), Le(MOST)]
"""One or more."""
CountOrZero = Annotated[int, Ge(0), Le(MOST)]
"""Zero or more."""
Batch = Annotated[int, Ge(1), Le(10**6)]
"""Examples or micro-batches that one rank reads for a step."""
Processes = Annotated[int, Ge(1), Le(1024)]
"""Processes on one machine."""
Ranks = Annotated[int, Ge(1), Le(65_536)]
"""Processes that train together."""
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
"""What NumPy, and so HF Trainer, takes as a seed."""
Positive = Annotated[float, Gt(0), Le(MOST)]
"""Above zero."""
NonNegative = Annotated[float, Ge(0), Le(MOST)]
"""Zero or above."""
Rate = Annotated[float, Gt(0), Le(100)]
"""A learning rate: SGD has been used with 30."""
Decay = Annotated[float, Ge(0), Le(100)]
"""A weight decay."""
Share = Annotated[float, Ge(0), Le(1)]
"""A part of a whole, both ends included."""
ShareBelowOne = Annotated[float, Ge(0), Lt(1)]
"""A part of a whole that may not be all of it (dropout, smoothing, Adam's betas)."""


@dataclass(frozen=True)
class Fits:
    """In a field's type: what a text must be. `fault` says what is wrong with a text that is not, or nothing."""

    fault: Callable[[str], str | None]


@dataclass(frozen=True)
class AlsoCalled:
    """In the type of a choice: what other libraries call some of the choices, where the most similar spelling would be
    another one."""

    names: tuple[tuple[str, str], ...]
    """The other name, in lower case and with hyphens, and the choice that is meant."""


LONGEST_PATH = 4096  # bytes; Linux takes no more
LONGEST_NAME = 255  # bytes between two slashes


def _no_path(text: str) -> str | None:
    """What keeps a text from being a path or a name on the hub."""
    if text.startswith("~") and os.path.expanduser(text) == text:
        return f"begins with `{text.partition('/')[0]}`, and this machine has no such user. Write the folder out."
    name = text.encode("utf-8", "surrogatepass")
    if len(name) > LONGEST_PATH:
        return f"is too long for a path: {len(name):,} bytes, and at most {LONGEST_PATH:,} are possible."
    longest = max(map(len, name.split(b"/")))
    if longest > LONGEST_NAME:
        return f"has a name of {longest:,} bytes between two slashes, and at most {LONGEST_NAME} are possible."
    return None


PathText = Annotated[str, Fits(_no_path)]
"""A path, or a name on the hub."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of the config sections."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}
    ALIASES: ClassVar[dict[str, str]] = {}
    INLINE: ClassVar[tuple[str, ...]] = ()
    HOMES: ClassVar[dict[str, str]] = {}
    TWINS: ClassVar[tuple[tuple[str, str], ...]] = ()
    SHORTHAND: ClassVar[str | None] = None
    USUAL: ClassVar[dict[str, Any]] = {}
    EXTRA: ClassVar[dict[str, Any]] = {}
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
