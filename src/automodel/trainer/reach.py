"""What the code of a script's own functions can get at.

Two questions are asked of such code: may a callback touch the model, and may a dataset draw random numbers or read
something that changes? Reading it proves nothing, but scripts are written plainly: the words that a function uses, the
globals and variables around it that they stand for, and the same for the functions and methods that it calls.
"""

from __future__ import annotations

import dis
import inspect
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

LIBRARIES = ("site-packages", sysconfig.get_paths()["stdlib"], "<frozen")
LONGEST = 64
"""Members of a list or a dictionary that are looked through; longer ones are data."""
DEEP = 3


@dataclass(frozen=True)
class Reach:
    """Of one function and all that it calls, as far as they are the script's own."""

    words: frozenset[str]
    """Names of variables, attributes and parameters, and all text."""
    places: tuple[tuple[str, dict[str, Any] | CellType], ...]
    """Where the globals and the variables of functions around it are found: their values may change."""

    def values(self) -> Iterator[tuple[str, Any]]:
        """What they stand for now."""
        for name, place in self.places:
            try:
                value = place.cell_contents if isinstance(place, CellType) else place.get(name)
            except ValueError:  # a variable that nobody has set yet
                continue
            yield name, value


def reach(start: Any, owner: type | None = None) -> Reach:
    """`owner`: the class whose methods `self` has."""
    todo: list[tuple[Any, type | None]] = [(start, owner)]
    seen: set[tuple[Any, type | None]] = set()
    words: set[str] = set()
    places: list[tuple[str, Any]] = []
    while todo:
        given, kind = todo.pop()
        function = _plain(given)
        if function is None or (function, kind) in seen:
            continue
        seen.add((function, kind))
        names = _words(function.__code__)
        words |= names
        found: list[tuple[str, Any]] = [(n, function.__globals__) for n in names if n in function.__globals__]
        found += zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for _, value in Reach(frozenset(), tuple(found)).values():
            if isinstance(value, ModuleType) and _is_own(getattr(value, "__file__", None) or "<frozen"):
                found += [(name, vars(value)) for name in names if name in vars(value)]
        places += found
        for _, value in Reach(frozenset(), tuple(found)).values():
            todo += [(value, kind)] if isinstance(value, FunctionType) else _methods(value, names, kind)
        todo += _methods(kind, names, kind)
    return Reach(frozenset(words), tuple(places))


def _methods(value: Any, names: set[str], owner: type | None) -> list[tuple[Any, type | None]]:
    """Methods of a class or an object that are called so; `f(x)` may mean `__call__`, and `super()` any of them. How
    the `owner`, whose method we come from, was made is over."""
    kind = value if isinstance(value, type) else type(value)
    if value is None or kind.__module__ in ("builtins", "typing"):
        return []
    made = ("__init__",) if isinstance(value, type) and value is not owner else ()
    asked = (*names, "__call__", "__getitem__", *made)
    found = [vars(base)[name] for base in kind.__mro__ for name in asked if name in vars(base)]
    return [(method, kind) for method in found if _plain(method) is not None]


def _plain(value: Any) -> FunctionType | None:
    """The function behind a method or a property, if it is the script's own."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) and _is_own(value.__code__.co_filename) else None


def _is_own(file: str) -> bool:
    return not any(part in file for part in LIBRARIES)


def _words(code: CodeType) -> set[str]:
    """Of a function and of those that are defined inside it."""
    found = {*code.co_varnames, *code.co_names, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _words(constant)
        elif isinstance(constant, str):
            found.add(constant)
    return found


def passes_keywords_on(function: Any) -> bool:
    """Whether a function does anything with its `**kwargs` but look up a name in it."""
    code = function.__code__
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    place = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    name, steps = code.co_varnames[place], list(dis.get_instructions(code))
    if name in code.co_cellvars:
        return True
    for number, step in enumerate(steps):
        asked = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname.startswith("LOAD_FAST") and name in asked:
            following = [next_.opname for next_ in steps[number + 1 : number + 4]]
            if not (following[:2] == ["LOAD_CONST", "BINARY_SUBSCR"] or _asks_for_a_name(steps[number + 1])):
                return True
    return False


def _asks_for_a_name(step: dis.Instruction) -> bool:
    return step.opname in ("LOAD_METHOD", "LOAD_ATTR") and step.argval in ("get", "pop", "keys")


def holds(value: Any, kinds: tuple[type, ...], deep: int = DEEP) -> bool:
    """Whether it is one of these kinds, or has one: in a short list or dictionary, or as an attribute of an object of
    the script's own."""
    if isinstance(value, kinds):
        return True
    if deep == 0 or isinstance(value, type | ModuleType | FunctionType | str | bytes):
        return False
    if isinstance(value, dict | list | tuple | set):
        inner = list(value.values() if isinstance(value, dict) else value) if len(value) <= LONGEST else []
    else:
        inner = list(vars(value).values()) if _is_own_object(value) else []
    return any(holds(part, kinds, deep - 1) for part in inner)


def _is_own_object(value: Any) -> bool:
    if not hasattr(value, "__dict__"):
        return False
    functions = (_plain(method) for method in vars(type(value)).values())
    return any(function is not None for function in functions)
