"""What a section class says about itself: its fields, their types, their documentation.

One place reads the dataclasses, for the loader, the schema and the reference page alike.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union

from automodel.config.section import Section

MISSING = dataclasses.MISSING


@dataclass(frozen=True)
class Field:
    """One key of a section."""

    name: str
    """The name in Python."""
    key: str
    """The name in a file: `_target_` for the field `target`."""
    hint: Any
    """The type, limits included."""
    doc: str
    section: type[Section] | None
    """The class of the nested section, when the field is one."""
    items: type[Section] | None
    """The class of each item, when the field is a list of sections."""
    nullable: bool
    required: bool
    default: Any
    """The default value; `MISSING` where there is none."""


def arms(hint: Any) -> list[Any]:
    """The alternatives of a union; a single type is its own only arm."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [arm for part in typing.get_args(hint) for arm in arms(part)]
    return [hint]


def bare(hint: Any) -> Any:
    """The type without its limits."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def choices(hint: Any) -> list[Any]:
    """Every value the `Literal` arms of a type allow."""
    return [c for arm in map(bare, arms(hint)) if typing.get_origin(arm) is Literal for c in typing.get_args(arm)]


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def doc_of(section: type[Section]) -> str:
    """A section's docstring on one line, without the key it opens with."""
    text = re.sub(r"^`\w+:` ", "", " ".join((inspect.getdoc(section) or "").split()))
    return text if text.startswith("torch.") else text[:1].upper() + text[1:]


@cache
def docs_of(section: type[Section]) -> dict[str, str]:
    """The docstring under each field, on one line."""
    try:
        source = textwrap.dedent(inspect.getsource(section))
    except (OSError, TypeError):  # built at run time, or shipped without sources
        return {}
    body = ast.parse(source).body[0]
    found: dict[str, str] = {}
    assert isinstance(body, ast.ClassDef)
    for statement, following in zip(body.body, body.body[1:]):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


@cache
def fields_of(section: type[Section]) -> dict[str, Field]:
    """The fields of a section by Python name, in order; `extra` and `typed` are left out, which are no keys."""
    hints = typing.get_type_hints(section, include_extras=True)
    docs = docs_of(section)
    found: dict[str, Field] = {}
    for f in dataclasses.fields(section):
        if f.name in ("extra", "typed"):
            continue
        hint = hints[f.name]
        parts = arms(hint)
        nested = next((p for p in parts if is_section(p)), None)
        listed = [kind for part in parts if typing.get_origin(part) is tuple for kind in typing.get_args(part)]
        default = f.default
        if f.default_factory is not MISSING:
            default = f.default_factory()
        found[f.name] = Field(
            name=f.name,
            key="_target_" if f.name == "target" else f.name,
            hint=hint,
            doc=docs.get(f.name) or (doc_of(nested) if nested else ""),
            section=nested,
            items=next((kind for kind in listed if is_section(kind)), None),
            nullable=type(None) in parts,
            required=default is MISSING,
            default=default,
        )
    return found


def takes_extra(section: type[Section]) -> bool:
    return any(f.name == "extra" for f in dataclasses.fields(section))


def keys_of(section: type[Section]) -> list[str]:
    """The keys a file may use, without aliases."""
    return [f.key for f in fields_of(section).values()]


def sections_of(root: type[Section], path: str = "", items: bool = False) -> Iterator[tuple[str, type[Section]]]:
    """Every section under `root` with its path, `root` itself first; with `items`, those in lists too."""
    yield path, root
    for f in fields_of(root).values():
        inner = f"{path}.{f.name}" if path else f.name
        if f.section is not None:
            yield from sections_of(f.section, inner, items)
        elif f.items is not None and items:
            yield f"{inner}[]", f.items
