"""The gate: a `_target_` is data until it has passed here.

A config file may come from anywhere, so a name in it must not be able to run anything. A target passes when

1. it is one of the names known for its slot (targets.py), which needs no import; or
2. it is a public name under a root that is open for its slot or trusted on the command line (`--trust my_package`;
   a file cannot widen that), every module on the way belongs to a trusted root (`transformers.utils.logging.os` does
   not), the object found was defined in one (aliases do not count), and it is of the kind the slot expects;

and its arguments fit its signature. Nothing outside the trusted roots is ever imported, and nothing is called here.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from automodel.config.errors import ConfigError, Problem, UserError
from automodel.config.fields import fields_of, takes_extra
from automodel.config.names import near, spellings
from automodel.config.section import Section
from automodel.config.targets import NAMED_ARGUMENTS, OPTIMIZER_NAMES, SLOTS, TRUSTED_ROOTS, Slot

REMOTE_CODE = "remote_code"
"""`--trust remote_code` allows `model.trust_remote_code: true`; it is not a package."""
REMOTE_DATA = "remote_data"
"""Stands among what is trusted where the command line says `--allow-remote-data`; no package either."""
NO_PACKAGES = (REMOTE_CODE, REMOTE_DATA)

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")


class Refused(Exception):
    """The target does not pass; the message says why."""


def canonical(target: str) -> str:
    """One name for all accepted spellings of a target."""
    return next((slot.known[target] for slot in SLOTS.values() if target in slot.known), target)


def check_trust(trust: Iterable[str]) -> None:
    """Refuses `--trust` of things that must never be trusted, or that are not packages."""
    for root in trust:
        if root in NO_PACKAGES:
            continue
        if not _DOTTED.match(root):
            raise UserError(f"--trust {root}: name a Python package, e.g. `--trust my_package`.")
        if root.split(".")[0] in sys.stdlib_module_names:
            raise UserError(
                f"--trust {root}: Python's own modules cannot be trusted; a config could then run anything."
            )


def trust_arguments(trust: Iterable[str]) -> list[str]:
    """What is trusted, as arguments of a command."""
    given = [["--allow-remote-data"] if root == REMOTE_DATA else ["--trust", root] for root in trust]
    return [argument for arguments in given for argument in arguments]


def resolve_target(target: str, slot: str, arguments: Iterable[str] = (), trust: Sequence[str] = ()) -> Any:
    """The object behind a `_target_`, once it has passed the gate. Raises `ConfigError` where it does not."""
    check_trust(trust)
    try:
        if target in SLOTS[slot].known:
            found = _walk(target, (*TRUSTED_ROOTS, "torch.utils.data"), private=True)
        else:
            found = _open_object(target, SLOTS[slot], trust)
        problems = _check_arguments(target, SLOTS[slot], found, arguments, (), complete=False)
    except Refused as refused:
        problems = [Problem("_target_", str(refused))]
    if problems:
        raise ConfigError(problems)
    return found


def check_section(config: Section, given: set[str], trust: Sequence[str]) -> list[Problem]:
    """What is wrong with a section's `_target_` and the arguments meant for it.

    `given` are the keys the user wrote. Defaults and usual values are not held against a target that does not take
    them, written out or not.
    """
    assert config.SLOT is not None
    slot, target = SLOTS[config.SLOT], getattr(config, "target", None)
    extra = getattr(config, "extra", {})
    known = fields_of(type(config))
    plain = {name: (f.default, config.USUAL.get(name, f.default)) for name, f in known.items()}
    given = {key for key in given if key not in known or getattr(config, key) not in plain[key]}
    named = target is None and config.SLOT == "optimizer"
    if named:
        target = OPTIMIZER_NAMES[getattr(config, "name", "adamw")]
    elif target is not None and config.SLOT == "optimizer" and "name" in given:
        return [Problem("name", "is for when there is no `_target_`, and there is one. Keep one of the two.")]
    if target is None or (target in slot.known and canonical(target) not in slot.arguments):
        return _check_plain_extra(config, extra)
    try:
        found = None if named or target in slot.known else _open_object(target, slot, trust)
    except Refused as refused:
        return [Problem("target", str(refused))]
    if config.SLOT == "optimizer":
        written = [key for key in sorted(given) if key not in ("target", "name", "decay_norms_and_biases")]
        return _check_arguments(target, slot, found, written, spellings(type(config)))
    # A maker of the user's gets those of the section's keys that it has parameters for; the rest is applied to what it
    # makes, except the keys that say where the data is, which only it could use.
    aliases = type(config).ALIASES
    offered = {name for name in known if getattr(config, name) is not None} - {"target"}
    offered |= {alias for alias, name in aliases.items() if name in offered}
    problems = _check_arguments(target, slot, found, list(extra), spellings(type(config)), offered=offered)
    if found is not None:
        accepted, _, takes_any = _signature(found)
        accepted = {aliases.get(name, name) for name in accepted}
        for key in ("path", "name", "data_files", "revision"):
            if key in given and key not in accepted and not takes_any:
                problems.append(Problem(key, f"`{canonical(target).rpartition('.')[2]}` does not take it. Remove it."))
    return problems


def unused_keys(config: Section) -> set[str]:
    """Keys of a section that its target does not take and that are therefore not shown."""
    if config.SLOT != "optimizer":
        return set()
    target = getattr(config, "target", None)
    used = canonical(target or OPTIMIZER_NAMES[getattr(config, "name", "adamw")])
    accepted = NAMED_ARGUMENTS.get(used) or SLOTS["optimizer"].arguments.get(used)
    adam = set() if accepted is None else {"betas", "eps"} - accepted
    return adam | ({"name"} if target else set())


def _check_plain_extra(config: Section, extra: dict[str, Any]) -> list[Problem]:
    """Unknown keys where no target takes them. A model's go to its own config, which is checked when it is read."""
    section = type(config)
    problems = []
    if not takes_extra(section):
        return problems
    for key in extra:
        if config.SLOT == "model":
            guess = near(key, spellings(section), cutoff=0.9)
            if guess:
                problems.append(Problem(key, f"there is no such key; did you mean `{guess}`?"))
            continue
        guess = near(key, spellings(section))
        also = f" did you mean `{guess}`?" if guess else " Only a `_target_` of your own takes further keys."
        problems.append(Problem(key, f"there is no such key;{also}" if guess else f"there is no such key.{also}"))
    return problems


# --- finding the object ----------------------------------------------------------------------------------------------


def _under(name: str, roots: Iterable[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _open_object(target: str, slot: Slot, trust: Sequence[str]) -> Any:
    """The object of an unknown target, after every check but that of its arguments."""
    if not _DOTTED.match(target):
        raise Refused(f"{target!r} is not a dotted name. This takes {slot.expects}.")
    packages = tuple(root for root in trust if root not in NO_PACKAGES)
    if not _under(target, (*TRUSTED_ROOTS, *packages)):
        raise Refused(_outside(target, slot))
    private = next((part for part in target.split(".") if part.startswith("_")), None)
    if private:
        raise Refused(f"`{target}` goes through the private name `{private}`. This takes {slot.expects}.")
    open_roots = (*slot.roots, *packages)
    if slot.kind is None or not _under(target, open_roots):
        raise Refused(_not_listed(target, slot))
    found = _walk(target, (*TRUSTED_ROOTS, *packages))
    if not slot.kind(found):
        raise Refused(f"`{target}` is {_what(found)}. This takes {slot.expects}.")
    if unfit := slot.unfit(found):
        raise Refused(f"`{target}` does not work here: {unfit}. Use `{next(iter(slot.known))}`, for example.")
    return found


def _outside(target: str, slot: Slot) -> str:
    root = target.split(".")[0]
    if root in sys.stdlib_module_names or root == "torch":
        return f"`{target}` may not be used from a config. This takes {slot.expects}."
    guess = near(target, list(slot.known), cutoff=0.8)
    hint = f" Did you mean `{guess}`?" if guess else ""
    return (
        f"`{target}` is outside the trusted packages ({', '.join(TRUSTED_ROOTS)}).{hint} If it is your own code, add "
        f"`--trust {root}` to the command line."
    )


def _not_listed(target: str, slot: Slot) -> str:
    guess = near(target, list(slot.known), cutoff=0.8)
    return f"`{target}` cannot be used here. " + (
        f"Did you mean `{guess}`?" if guess else f"This takes {slot.expects}."
    )


def _walk(target: str, roots: Sequence[str], private: bool = False) -> Any:
    """Follows a dotted name from its root, through trusted modules only."""
    root = max((r for r in roots if _under(target, [r])), key=len)
    found: Any = _import(root, target)
    for part in target.split(".")[root.count(".") + 1 :]:
        if part.startswith("_") and not private:
            raise Refused(f"`{target}` goes through the private name `{part}`.")
        found = _step(found, part, target)
        if isinstance(found, ModuleType) and not _under(found.__name__, roots):
            raise Refused(f"`{target}` leaves the trusted packages at `{part}`, the module `{found.__name__}`.")
    if isinstance(found, ModuleType):
        raise Refused(f"`{target}` is a module; name the class or function in it.")
    owner = getattr(found, "__self__", None)
    home = getattr(owner if inspect.isclass(owner) else found, "__module__", None) or "an unknown place"
    if not _under(home, roots):
        raise Refused(f"`{target}` leaves the trusted packages: it is only another name for something in `{home}`.")
    return found


def _step(found: Any, part: str, target: str) -> Any:
    try:
        return getattr(found, part)
    except AttributeError:
        pass
    except Exception as error:  # lazy modules import on access, and may fail in any way
        raise Refused(f"`{target}` cannot be imported: {type(error).__name__}: {error}.") from error
    if isinstance(found, ModuleType) and hasattr(found, "__path__"):
        try:
            return importlib.import_module(f"{found.__name__}.{part}")
        except ModuleNotFoundError as error:
            if error.name != f"{found.__name__}.{part}":
                raise Refused(f"`{target}` cannot be imported: {error}.") from error
        except Exception as error:
            raise Refused(f"`{target}` cannot be imported: {type(error).__name__}: {error}.") from error
    names = [n for n in dir(found) if not n.startswith("_")]
    guess = near(part, names)
    place = getattr(found, "__name__", type(found).__name__)
    raise Refused(f"`{place}` has no `{part}`" + (f"; did you mean `{guess}`?" if guess else "."))


def _import(name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and _under(name, [error.name]):
            raise Refused(
                f"`{target}`: there is no package `{error.name}` here. Install it, or put its folder on PYTHONPATH."
            ) from error
        raise Refused(f"`{target}` cannot be imported: {error}.") from error
    except Exception as error:  # the user's own module may fail in any way while it is imported
        raise Refused(f"`{target}` cannot be imported: {type(error).__name__}: {error}.") from error


def _what(found: Any) -> str:
    if inspect.isclass(found):
        return "a class of another kind"
    return "a function" if callable(found) else f"a value of type {type(found).__name__}"


# --- its arguments ---------------------------------------------------------------------------------------------------


def _check_arguments(
    target: str,
    slot: Slot,
    found: Any,
    arguments: Iterable[str],
    own: Sequence[str],
    offered: Iterable[str] = (),
    complete: bool = True,
) -> list[Problem]:
    """Arguments the target does not take, and, where they are `complete`, those it cannot do without."""
    name = canonical(target).rpartition(".")[2]
    known = NAMED_ARGUMENTS.get(target) or slot.arguments.get(canonical(target))
    required: set[str] = set()
    if known is not None:
        accepted, takes_any = set(known), False
    elif found is not None:
        accepted, required, takes_any = _signature(found)
    else:
        return []
    accepted -= slot.supplied
    given = list(arguments)
    problems = [
        Problem(key, _unknown_argument(key, name, accepted, own))
        for key in given
        if key not in accepted and not takes_any
    ]
    lacking = sorted(required - slot.supplied - set(given) - set(offered)) if complete else []
    if lacking:
        them = "it" if len(lacking) == 1 else "them"
        listed = ", ".join(f"`{key}`" for key in lacking)
        problems.append(Problem("target", f"`{name}` also needs {listed}; add {them} to the section."))
    return problems


def _signature(found: Any) -> tuple[set[str], set[str], bool]:
    """Names a callable accepts, those without default, and whether it takes any keyword."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return set(), set(), True
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = {p.name for p in by_name if p.default is p.empty}
    return {p.name for p in by_name}, required, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _unknown_argument(key: str, name: str, accepted: set[str], own: Sequence[str]) -> str:
    if key in own:
        return f"`{name}` has no such setting. Remove it."
    guess = near(key, [*sorted(accepted), *own])
    if guess:
        return f"`{name}` takes no such argument; did you mean `{guess}`?"
    return f"`{name}` takes no such argument; it takes {', '.join(sorted(accepted)) or 'none'}."
