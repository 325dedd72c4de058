"""A node of the tree as a value of a field's type, or a sentence about why it is none.

Types are strict, with three kindnesses that lose nothing: a number written where text is wanted stays the text as
written (`name: 2024`); a whole float is a whole number (`max_steps: 1e5`); `none` is null where null is allowed.
Text in quotes is text: `batch_size: "8"` is refused. pydantic holds the rules for scalars and their limits; the
sentences are ours.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import TypeAdapter, ValidationError

from automodel.config.fields import MISSING, arms, bare, choices
from automodel.config.names import near
from automodel.config.section import AlsoCalled, Fits
from automodel.config.tree import (
    COMMAND_LINE,
    Listing,
    Mapping,
    Node,
    Scalar,
    is_null,
    letter_fault,
    plain_value,
    scalar_value,
    to_python,
)
from automodel.config.written import hide_secrets


class Misfit(Exception):
    """The value does not fit. Each part has a path relative to the field: `0` for the first item of a list."""

    def __init__(self, message: str, node: Node):
        super().__init__(message)
        self.parts: list[tuple[str, str, Node]] = [("", message, node)]


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def fit(hint: Any, node: Node, default: Any = MISSING) -> Any:
    """`node` as a value of type `hint`. Raises `Misfit`."""
    kinds = arms(hint)
    if any(bare(kind) is Any for kind in kinds):
        return to_python(node)
    if isinstance(node, Scalar):
        return _fit_scalar(hint, node, default)
    container = tuple if isinstance(node, Listing) else dict
    kind = next((k for k in kinds if typing.get_origin(k) is container), None)
    if kind is None:
        if node.text is not None and str in map(bare, kinds):
            return _text(hint, node.text, node)  # typed on the command line, where `{question}` needs no quotes
        raise Misfit(f"expected {describe(hint)}, got {got(node)}.{_quote_advice(hint, node)}", node)
    if isinstance(node, Listing):
        return _fit_list(kind, node)
    assert isinstance(node, Mapping)
    return _fit_dict(kind, node)


def _fit_list(kind: Any, node: Listing) -> tuple[Any, ...]:
    hints = typing.get_args(kind)
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(node.items)
    if len(hints) != len(node.items):
        raise Misfit(f"expected {describe(kind)}, got a list of {len(node.items)}.", node)
    named = {str(i): (h, item) for i, (h, item) in enumerate(zip(hints, node.items))}
    return tuple(_fit_all(named, node).values())


def _fit_dict(kind: Any, node: Mapping) -> dict[str, Any]:
    value_hint = typing.get_args(kind)[1]
    return _fit_all({key: (value_hint, entry.node) for key, entry in node.entries.items()}, node)


def _fit_all(named: dict[str, tuple[Any, Node]], node: Node) -> dict[str, Any]:
    """Every item, or one `Misfit` that tells of all the bad ones."""
    values: dict[str, Any] = {}
    parts: list[tuple[str, str, Node]] = []
    for key, (hint, item) in named.items():
        try:
            values[key] = fit(hint, item)
        except Misfit as misfit:
            parts += [(f"{key}.{path}".rstrip("."), message, at) for path, message, at in misfit.parts]
    if parts:
        misfit = Misfit(parts[0][1], node)
        misfit.parts = parts
        raise misfit
    return values


def check_untyped(node: Scalar) -> None:
    """Raises `Misfit` for what is of no use to any target: numbers that are not finite, texts that are none."""
    value = scalar_value(node)
    if isinstance(value, str):
        _text(Any, value, node)
    if isinstance(value, float) and not math.isfinite(value):
        raise Misfit(f"must be an ordinary number, got {show(value)}.", node)


def _fit_scalar(hint: Any, node: Scalar, default: Any) -> Any:
    value = scalar_value(node)
    candidates = [value]
    if isinstance(value, float) and value.is_integer() and float not in map(bare, arms(hint)):
        candidates.append(int(value))
    if node.plain and not isinstance(value, str):
        candidates.append(node.text)
    for candidate in candidates:
        if isinstance(candidate, float) and not math.isfinite(candidate):
            continue
        try:
            value = _adapter(hint).validate_python(candidate, strict=True)
        except ValidationError:
            continue
        return _text(hint, value, node) if isinstance(value, str) else value
    raise Misfit(_refusal(hint, node, value, default), node)


def _text(hint: Any, text: str, node: Node) -> str:
    """A text of the right type, if nothing is wrong with it."""
    fault = letter_fault(text) or next(_faults(hint, text), None)
    if fault and isinstance(node, Scalar) and node.typed is not None:  # what the environment has may be a secret
        fault = f"is not what this key takes: {got(node)}."
    if fault:
        raise Misfit(fault, node)
    return text


def _faults(hint: Any, text: str) -> Iterator[str]:
    """What is wrong with a text of the right type."""
    for arm in arms(hint):
        for limit in getattr(arm, "__metadata__", ()):
            if isinstance(limit, Fits) and (fault := limit.fault(text)):
                yield fault


# --- the sentences ---------------------------------------------------------------------------------------------------


def _refusal(hint: Any, node: Scalar, value: Any, default: Any) -> str:
    options = choices(hint)
    if is_null(node):
        return _null_refusal(hint, default)
    if options and isinstance(value, str):
        known = _also_called(hint).get(value.lower().replace("_", "-"))
        guess = known if known in options else near(value, [str(o) for o in options], cutoff=0.5)
        switch = ["true", "false"] if bool in arms(hint) else []
        listed = ", ".join([*switch, *map(str, options)])
        asked = repr(short(value)) if node.typed is None else f"such value as {got(node)}"
        return f"there is no {asked} here; choose one of {listed}." + (f" Did you mean `{guess}`?" if guess else "")
    limited = _limit_refusal(hint, value, got(node))
    if limited:
        # Where null is a choice besides the default, it is how something is turned off; elsewhere people write 0.
        off = value == 0 and type(None) in arms(hint) and default not in (None, MISSING)
        return f"{limited} Null turns it off." if off else limited
    return f"expected {describe(hint)}, got {got(node)}.{_quote_advice(hint, node)}"


def _also_called(hint: Any) -> dict[str, str]:
    """Choices of a type by the names that other libraries have for them."""
    marks = (mark for arm in arms(hint) for mark in getattr(arm, "__metadata__", ()) if isinstance(mark, AlsoCalled))
    return {name: choice for mark in marks for name, choice in mark.names}


def _null_refusal(hint: Any, default: Any) -> str:
    if default is MISSING:
        return f"expected {describe(hint)}, got nothing."
    return f"expected {describe(hint)}, got null. Leave the key out for the default ({show(default)})."


def _limit_refusal(hint: Any, value: Any, written: str) -> str | None:
    """When the type is right and the size is not. `written`: the value in words."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    for arm in arms(hint):
        whole = isinstance(value, int) or math.isinf(value) or value.is_integer()
        if bare(arm) is float or (bare(arm) is int and whole):
            limits = _limits(arm, value)
            if limits or not math.isfinite(value):
                return f"must be {limits or 'an ordinary number'}, got {written}."
    return None


FAR = 100  # an upper bound from here on only keeps typing errors out


def _limits(hint: Any, value: float | None = None, every: bool = False) -> str:
    """The limits in words. Far ones are left out, unless `value` lies beyond them or `every` one is asked for."""
    words = []
    for limit in getattr(hint, "__metadata__", ()):
        match limit:
            case Ge(ge=bound):
                words.append(f"at least {bound:,}")
            case Gt(gt=bound):
                words.append(f"above {bound:,}")
            case Le(le=bound) if every or bound < FAR or (value is not None and value > bound):
                words.append(f"at most {bound:,}")
            case Lt(lt=bound):
                words.append(f"below {bound:,}")
    return " and ".join(words)


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_PLURALS = {int: "whole numbers", float: "numbers", bool: "truth values", str: "texts"}


def describe(hint: Any, every: bool = False) -> str:
    """A type in words: `a whole number (at least 1)`. Null is left out, since something else was meant.
    `every`: with far limits, too."""
    return " or ".join(_describe_arm(arm, every) for arm in arms(hint) if arm is not type(None))


def _describe_arm(arm: Any, every: bool) -> str:
    kind, args = bare(arm), typing.get_args(bare(arm))
    if kind in _KINDS:
        limits = _limits(arm, every=every)
        return f"{_KINDS[kind]} ({limits})" if limits else _KINDS[kind]
    if typing.get_origin(kind) is Literal:
        return " or ".join(f"`{c}`" for c in args)
    if typing.get_origin(kind) is tuple:
        item = _PLURALS.get(bare(args[0]), "items")
        return f"a list of {item}" if Ellipsis in args else f"a list of {len(args)} {item}"
    if typing.get_origin(kind) is dict:
        return "a mapping of names to values"
    return "a value"


def got(node: Node) -> str:
    """What was written, in words."""
    if isinstance(node, Listing):
        return "a list"
    if isinstance(node, Mapping):
        return "a mapping"
    value = scalar_value(node)
    if node.typed is not None:  # what the environment has may be a secret
        kind = _KINDS.get(type(value), "null")
        return f"{kind} from the environment ({hide_secrets(node.typed)})"
    if isinstance(value, str):
        return f"the text {short(hide_secrets(value))!r}"
    return show(value)


def short(text: str, letters: int = 60) -> str:
    """The beginning of a text that is too long for a line."""
    return text if len(text) <= letters else f"{text[: letters - 3]}…"


def on_one_line(value: Any) -> str:
    """What a file of others holds, for a message."""
    text = value if isinstance(value, str) else repr(value)
    return short(" ".join(text.split()), 160)


def show(value: Any) -> str:
    """A value as it is written in a file."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(show, value))}]"
    return short(str(value))


def _may_hold(listed: Any, text: str) -> bool:
    """Whether the text may be what a list holds: anything for one of texts, else what reads as numbers."""
    numbers = bool(typing.get_args(listed)) and bare(typing.get_args(listed)[0]) in (int, float)
    return not numbers or all(type(plain_value(t.strip())) in (int, float) for t in text.strip("()[]").split(","))


def _quote_advice(hint: Any, node: Node) -> str:
    kinds = [bare(arm) for arm in arms(hint)]
    if isinstance(node, Mapping) and node.place.name == COMMAND_LINE and node.text is None:
        return " It has no keys of its own to set."
    if isinstance(node, Mapping | Listing):
        return " Put text that starts with `{` in quotes." if str in kinds and isinstance(node, Mapping) else ""
    if len(node.text) <= 60 and any(typing.get_origin(kind) is tuple and _may_hold(kind, node.text) for kind in kinds):
        return f" Write `[{(node.typed or node.text).strip('()')}]`."
    if not node.plain and any(type(plain_value(node.text)) is kind for kind in kinds):
        return " Remove the quotes."
    return ""
