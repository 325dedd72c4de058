"""A config before it has types: mappings, lists and scalars, each knowing where it was written.

Scalars keep their text as written. Whether `8`, `no` or `1e5` is a number, a truth value or a name is decided later,
by the type of the key it is given to (values.py), so `revision: 1234567` and `name: no` stay text without quotes.
Every node carries its `Place`, so that any later complaint can say `run.yaml:12`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

COMMAND_LINE = "command line"
MOST_LEVELS = 60  # of keys and lists inside each other; a config has four
MOST_DIGITS = 300  # of a whole number; a decimal number has at most 309 before its point


@dataclass(frozen=True, order=True)
class Place:
    """Where something was written. Places sort in the order files were given, then by line, command line last."""

    layer: int
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}:{self.line}" if self.line and self.name != COMMAND_LINE else self.name


@dataclass
class Scalar:
    """One value. `plain` means written without quotes, so it may be a number, a truth value or null."""

    text: str
    plain: bool
    place: Place
    typed: str | None = None
    """What was typed, where variables were filled into it: `${NAME}`."""


@dataclass
class Listing:
    items: list[Node]
    place: Place
    text: str | None = None
    """As typed, when it came from the command line: `{question}` may have been meant as text."""


@dataclass
class Entry:
    """A key as the user spelt it, and its value."""

    key: str
    node: Node
    place: Place


@dataclass
class Mapping:
    entries: dict[str, Entry]
    place: Place
    text: str | None = field(default=None, kw_only=True)


Node = Scalar | Listing | Mapping

# YAML 1.1's words, as PyYAML reads them; `none` is how the reference writes null.
_TRUE = {"yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"}
_FALSE = {"no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"}
_NULL = {"", "~", "null", "Null", "NULL", "none", "None", "NONE"}
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+$")  # octal to some, decimal to others: kept as text, so it is refused
_HALF = re.compile(r"[\ud800-\udfff]")
_NOT_FINITE = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}


def is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.plain and node.text in _NULL


def is_empty(node: Node) -> bool:
    """`wandb:` with nothing after it: the section with its defaults, not null."""
    return isinstance(node, Scalar) and node.plain and node.text == ""


def plain_value(text: str) -> Any:
    """What an unquoted scalar means where nothing says what it should be. `1e-4` is a number."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INT.match(text) and len(text) <= MOST_DIGITS:
        return int(text.replace("_", ""))
    if _FLOAT.match(text) and not _LEADING_ZERO.match(text):
        return float(text.replace("_", ""))
    if text.lower() in _NOT_FINITE:
        return float(_NOT_FINITE[text.lower()])
    return text


def scalar_value(scalar: Scalar) -> Any:
    return plain_value(scalar.text) if scalar.plain else scalar.text


def to_python(node: Node) -> Any:
    """The node as plain dicts, lists and scalars, where no type is known (arguments of a `_target_`)."""
    if isinstance(node, Scalar):
        return scalar_value(node)
    if isinstance(node, Listing):
        return [to_python(item) for item in node.items]
    return {key: to_python(entry.node) for key, entry in node.entries.items()}


def to_typed(node: Node) -> Any:
    """As `to_python`, with `${NAME}` where a variable was filled in; literal `${` as a file has it."""
    if isinstance(node, Scalar):
        value = scalar_value(node) if node.typed is None else node.typed
        return value.replace("${", "$${") if isinstance(value, str) and node.typed is None else value
    if isinstance(node, Listing):
        return [to_typed(item) for item in node.items]
    return {key: to_typed(entry.node) for key, entry in node.entries.items()}


def whole_letters(text: str) -> str:
    """The text, with letters that JSON and YAML write as two `\\u` escapes put together."""
    if not _HALF.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def letter_fault(text: str) -> str | None:
    """What no text may hold, as a sentence: it could neither be printed nor be written to a file."""
    if "\0" in text:
        return "holds a NUL character, which no text has. Remove it."
    if half := _HALF.search(text):
        return f"holds half of a letter (\\u{ord(half[0]):04x}). Write the letter itself, as UTF-8."
    return None


def item_number(key: str) -> int | None:
    """The number of a list's item, where a key is one: `tags.0` names the first tag."""
    return int(key) if key.isdecimal() and len(key) <= 9 else None


def entry_at(tree: Mapping, path: str) -> Entry | None:
    """The entry of `section.key`, where the tree has one."""
    outer, _, inner = path.rpartition(".")
    section = tree.entries.get(outer)
    return section.node.entries.get(inner) if section is not None and isinstance(section.node, Mapping) else None


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every node with its path as spelt, parents first."""
    yield path, node
    prefix = f"{path}." if path else ""
    if isinstance(node, Listing):
        for index, item in enumerate(node.items):
            yield from walk(item, f"{prefix}{index}")
    elif isinstance(node, Mapping):
        for entry in node.entries.values():
            yield from walk(entry.node, f"{prefix}{entry.key}")
