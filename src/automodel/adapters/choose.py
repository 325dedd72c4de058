"""Which modules of a model get adapters, which are trained in full, and how PEFT is told.

A name of the config is a module's full name, the end of it (`q_proj`, `output.dense`), or a glob over either. One text
in the place of a list may also be a regular expression for whole names, which is how PEFT reads it. Whatever matches
nothing is an error that lists what there is: an adapter that silently stands nowhere trains nothing.

`all-linear`, the default for every family, is each linear layer of the blocks: attention and MLP. Adapters on attention
alone are smaller, but learn less. Heads are left out of it: a classification head is new and is trained in full, the
output head of a language model is mostly the word table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from automodel.adapters.lora import is_linear
from automodel.config.errors import UserError

ALL_LINEAR = "all-linear"
ROUTERS = ("router", "gate")  # they choose experts; an adapter there would move tokens about
CLASSIFIERS = ("SEQ_CLS", "TOKEN_CLS")  # PEFT's names of adapters under a head that scores classes


def matches(name: str, pattern: str) -> bool:
    """Whether a module is meant by a name or glob of the config."""
    return name == pattern or name.endswith(f".{pattern}") or fnmatchcase(name, pattern) or fnmatchcase(
        name, f"*.{pattern}"
    )  # fmt: skip


def _meaning(asked: str, modules: Iterable[str]) -> Callable[[str, str], bool]:
    """How one text in the place of a list is read: as PEFT does where it is neither name nor glob of any module."""
    if any(matches(name, asked) for name in modules):
        return matches
    try:
        pattern = re.compile(asked)
    except re.error:
        return matches
    return lambda name, _: pattern.fullmatch(name) is not None


def choose_saved(model: Any, task_type: str, asked: Sequence[str]) -> tuple[str, ...]:
    """Modules trained in full: the head and pooler of a classifier, and those the config names. Outermost ones only."""
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: set[str] = set()
    if task_type in CLASSIFIERS:
        chosen |= {name for name, child in model.named_children() if name != model.base_model_prefix and _learns(child)}
        chosen |= {name for name, module in modules.items() if name.split(".")[-1] == "pooler" and _learns(module)}
    for pattern in asked:
        found = {name for name, module in modules.items() if matches(name, pattern) and _learns(module)}
        if not found:
            raise _unmatched("peft.modules_to_save", pattern, modules)
        chosen |= found
    outermost = [name for name in modules if name in chosen and not _inside(name, chosen - {name})]
    _refuse_shared(model, outermost)
    return tuple(outermost)


def choose_targets(
    model: Any, asked: str | Sequence[str] | None, excluded: Sequence[str], saved: Sequence[str]
) -> tuple[str, ...]:
    """Modules that get adapters, in the model's order."""
    modules = {name: module for name, module in model.named_modules() if name and not _inside(name, saved)}
    linear = {name: module for name, module in modules.items() if is_linear(module)}
    chosen: set[str] = set()
    means = _meaning(asked, [*modules, *saved]) if isinstance(asked, str) else matches
    for pattern in [asked or ALL_LINEAR] if asked is None or isinstance(asked, str) else asked:
        if pattern == ALL_LINEAR:
            head = model.get_output_embeddings()
            found = {n for n, m in linear.items() if m is not head and n.split(".")[-1] not in ROUTERS}
        else:
            found = {name for name in linear if means(name, pattern)}
        if not found:
            full = [name for name in saved if means(name, pattern)]
            if full:
                raise _in_full(pattern, full[0])
            others = [name for name in modules if means(name, pattern)]
            raise _no_target(pattern, others, modules, linear, alone=isinstance(asked, str))
        chosen |= found
    for pattern in excluded:
        found = {name for name in linear if matches(name, pattern)}
        if not found:
            raise _unmatched("peft.exclude_modules", pattern, linear)
        chosen -= found
    if not chosen and not excluded:
        raise UserError("peft.target_modules: is an empty list. Name modules, or leave the key out for `all-linear`.")
    if not chosen:
        raise UserError("peft.exclude_modules: leaves no module for an adapter. Remove some of it.")
    return tuple(name for name in linear if name in chosen)


def shortest_names(chosen: Iterable[str], every: Iterable[str]) -> list[str]:
    """The shortest ends of names that mean exactly the chosen modules, as PEFT reads them: `q_proj` rather than one
    name for each layer, but `output.dense` where `dense` would mean a pooler too."""
    wanted, others = set(chosen), set(every) - set(chosen)
    ends_of_others = {end for name in others for end in _ends(name)}
    return sorted({next(end for end in _ends(name) if end not in ends_of_others) for name in wanted})


def in_short(names: Iterable[str]) -> str:
    """`q_proj ×28, v_proj ×28`: the last part of each name, with how many there are."""
    counts = Counter(name.split(".")[-1] for name in names)
    return ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in counts.items())


def _ends(name: str) -> list[str]:
    """`c`, `b.c`, `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]


def _inside(name: str, outer: Iterable[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in outer)


def _learns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _refuse_shared(model: nn.Module, saved: Sequence[str]) -> None:
    """A module whose weight is another module's as well cannot be trained in one place and frozen in the other."""
    homes: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            homes.setdefault(id(parameter), []).append(name)
    for names in homes.values():
        inside = [name for name in names if _inside(name, saved)]
        if inside and len(inside) < len(names):
            others = ", ".join(f"'{name}'" for name in names if name not in inside)
            raise UserError(
                f"peft.modules_to_save: the weight of '{inside[0]}' is that of {others} as well (tied). "
                "Name all of them, which are then trained as one, or none."
            )


def _in_full(pattern: str, name: str) -> UserError:
    return UserError(f"peft.target_modules: '{pattern}' means '{name}', trained in full. Take it out of one list.")


def _no_target(
    pattern: str, others: list[str], modules: dict[str, nn.Module], linear: dict[str, nn.Module], alone: bool
) -> UserError:
    """`others`: modules that are meant, and not linear. `alone`: the pattern is one text, not an entry of a list."""
    if others:
        kind = type(modules[others[0]]).__name__
        return UserError(
            f"peft.target_modules: '{pattern}' means '{others[0]}', a {kind}; adapters stand beside linear layers. "
            f"There are: {in_short(linear)}."
        )
    return _unmatched("peft.target_modules", pattern, linear, _how_read(pattern, linear) if alone else "")


def _how_read(text: str, linear: Iterable[str]) -> str:
    parts = re.split(r"[,\s]+", text.strip(", "))
    if len(parts) > 1 and all(re.fullmatch(r"[\w.*?-]+", part) for part in parts):
        return f" Give a list: [{', '.join(parts)}]."
    example = next(iter(linear), "model.layers.0.q_proj").split(".")[-1]
    return f" One text is a name, a glob, or a regular expression for the whole name (.*{example})."


def _unmatched(key: str, pattern: str, there: Iterable[str], more: str = "") -> UserError:
    names = in_short(there) or "nothing"
    return UserError(f"{key}: no module of the model is called '{pattern}'. There are: {names}.{more}")
