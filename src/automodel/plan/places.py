"""What relative paths in a run's own config mean: what they meant where the run was started.

`run/config.yaml` keeps paths as they were typed, below a line that says which folder they were typed in. Whoever reads
it from elsewhere looks there, not in a folder that happens to have a file of the same name. A project that was moved as
a whole is recognised by its run folder, which still lies where `checkpoint_dir` says; what is only found in the current
folder is taken from there, as on another machine. Either is said. Names on the hub stay as they are, and so do the
settings of the command line.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from automodel.config.environment import filled
from automodel.config.run_folders import trained_from_same_name
from automodel.config.section import Typed
from automodel.config.tree import Place
from automodel.config.yaml_text import parse_yaml
from automodel.data.config import BUILDERS, PATTERN
from automodel.data.hub_names import names_the_hub
from automodel.plan.config import RunConfig

T = TypeVar("T")

RUN_FOLDER = "checkpoint.checkpoint_dir"
_OF_ROWS = ("path", "data_files", "chat_template")
KEYS = (
    *(f"model.{key}" for key in ("pretrained_model_name_or_path", "tokenizer", "cache_dir")),
    *(f"{part}.{key}" for part in ("dataset", "validation_dataset") for key in (*_OF_ROWS, "cache_dir")),
    *(f"{part}.mixture.*.{key}" for part in ("dataset", "validation_dataset") for key in _OF_ROWS),
    "peft.pretrained_adapter",
    RUN_FOLDER,
    "wandb.dir",
    "mlflow.tracking_uri",
    "tensorboard.log_dir",
)
"""Keys whose values may be paths."""
MODELS = ("model.pretrained_model_name_or_path", "model.tokenizer")
_NOTED = "# Relative paths are those of the folder that the run was started in: "


def with_folder(text: str) -> str:
    """The text of a config, with the folder that its relative paths are meant from."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # somebody removed it; then nothing relative was found in it either
        return text
    return f"{_NOTED}{json.dumps(here, ensure_ascii=not here.isprintable())}\n{text}"


def homes_of(config: str | Path) -> tuple[str, ...]:
    """The folders that relative paths in a run's own config may be meant from, the likeliest first: the one that its
    run folder lies in as `checkpoint_dir` says, and the one it was started in. None for any other file."""
    file = os.path.abspath(os.path.expanduser(config))
    root, inside = os.path.split(os.path.dirname(file))
    if (inside, os.path.basename(file)) != ("run", "config.yaml"):
        return ()
    try:
        text = Path(file).read_text(encoding="utf-8")
        written = filled(str(parse_yaml(text)["checkpoint"]["checkpoint_dir"]))
    # Whatever is wrong with it is for the config's reader to complain of.
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return ()
    found = [None if written is None else _around(root, written)]
    with suppress(ValueError):
        found.append(_noted_in(text))
    return tuple(dict.fromkeys(home for home in found if home is not None))


def run_folder_of(config: Path) -> Path | None:
    """The run folder that a run's own config says it belongs to, as an absolute path; None where it does not say."""
    try:
        text = config.read_text(encoding="utf-8")
        said = filled(str(parse_yaml(text)["checkpoint"]["checkpoint_dir"]))
        if said is None:  # a variable that is not set here
            return None
        written, started = Path(said).expanduser(), _noted_in(text)
    except (OSError, ValueError, RuntimeError, yaml.YAMLError, KeyError, TypeError):
        return None
    if written.is_absolute():
        return written
    return Path(started) / written if started is not None else None


def _noted_in(text: str) -> str | None:
    """The folder that a run was started in, as the first line of its config says; None where it does not."""
    first = text.split("\n", 1)[0]
    found = json.loads(first.removeprefix(_NOTED)) if first.startswith(_NOTED) else None
    return found if isinstance(found, str) else None


def _around(root: str, written: str) -> str | None:
    """The folder in which `written` is the run folder; None where that lies elsewhere, or is no relative path."""
    inner = os.path.normpath(os.path.expanduser(written))
    for place in (Path(root), Path(os.path.realpath(root))):
        for folder in (place, *place.parents):
            if not os.path.isabs(inner) and folder / inner == place:
                return os.path.realpath(folder)
    return None


def as_meant(cfg: RunConfig, places: Mapping[str, Place]) -> tuple[RunConfig, list[str]]:
    """The config with relative paths out of a run's own config made absolute, unless they are those of the current
    folder anyway; and what a person should know about where they lead. `places`: which file each key is from."""
    known: dict[str, tuple[str, ...]] = {}
    elsewhere: dict[tuple[str, str], list[str]] = {}

    def change(key: str, value: str) -> str:
        file = places[key].name if key in places else ""
        homes = known.setdefault(file, homes_of(file) if file else ())
        if homes and _of_the_hub(key, value, homes):
            return value
        placed, home = found_at(value, homes, always=key == RUN_FOLDER)
        if home is not None and homes and home != homes[-1]:
            elsewhere.setdefault((file, home), []).append(key)
        return placed

    before, cfg = cfg, changed_paths(cfg, change)
    cfg = replace(cfg, typed={path: _moved(before, cfg, path, typed) for path, typed in cfg.typed.items()})
    notes = [
        f"{file}: the run was started in {known[file][-1]}; now these are read from {home}: {', '.join(keys)}"
        for (file, home), keys in elsewhere.items()
    ]
    return cfg, notes


def _moved(before: RunConfig, now: RunConfig, path: str, typed: Typed) -> Typed:
    """How a value was typed, with the folder in front of it that was put in front of the value."""
    was, value = _at(before, path), _at(now, path)
    return typed if was == value or was != typed.value else Typed(value=value, text=_in_front(was, value, typed.text))


def _in_front(was: Any, value: Any, text: Any) -> Any:
    if isinstance(was, list | tuple):
        return [_in_front(*parts) for parts in zip(was, value, text, strict=True)]
    folder = value.removesuffix(os.path.normpath(was)) if isinstance(was, str) else ""
    return f"{folder}{text.removeprefix('./')}" if folder and folder != value else text


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config[int(key)] if isinstance(config, list | tuple) else _value(config, key)
    return config


def _of_the_hub(key: str, value: str, homes: Sequence[str]) -> bool:
    """Whether a name means the hub although there is a folder of that name: a run has written it since."""
    here = os.path.realpath(os.curdir)
    folder = next(filter(None, (_there(home, value) for home in (*homes, here))), None)
    if folder is None:
        return False
    if key.endswith(".path"):
        return names_the_hub(value, Path(folder))
    return key in MODELS and trained_from_same_name(value, Path(folder))


def found_at(value: str, homes: Sequence[str], always: bool = False) -> tuple[str, str | None]:
    """A path as it is to be read from here, and the folder it is relative to; as it is, and None, where it is absolute
    or there is nothing of that name. `always`: it need not be there yet."""
    if not homes or os.path.isabs(os.path.expanduser(value)):
        return value, None
    here = os.path.realpath(os.curdir)
    for home in (*homes, here):
        place = _there(home, value)
        if place is not None:
            return (value if os.path.realpath(home) == here else place), home
    if always and os.path.isdir(homes[0]) and os.path.realpath(homes[0]) != here:
        return os.path.normpath(os.path.join(homes[0], value)), homes[0]
    return value, None


def _there(home: str, value: str) -> str | None:
    place = os.path.normpath(os.path.join(home, value))
    if os.path.exists(place):
        return place
    if any(sign in value for sign in PATTERN):
        pattern = os.path.join(glob.escape(home), value)
        return pattern if next(glob.iglob(pattern, recursive=True), None) else None
    return None


def changed_paths(config: T, change: Callable[[str, str], str]) -> T:
    """A config, or its tree, with `change(key, value)` for every value that may be a path."""
    usual = _value(_value(config, "dataset"), "path")  # validation data without a path of their own have that one
    for key in KEYS:
        config = _changed(config, key.split("."), "", usual, change)
    return config


def _changed(node: Any, keys: Sequence[str], path: str, usual: str | None, change: Callable[[str, str], str]) -> Any:
    if not keys:
        if isinstance(node, list | tuple):
            return type(node)(_changed(item, (), path, usual, change) for item in node)
        return change(path.removeprefix("."), node) if isinstance(node, str) and node else node
    if isinstance(node, list | tuple):
        return type(node)(_changed(item, keys[1:], f"{path}.{i}", usual, change) for i, item in enumerate(node))
    name, value = keys[0], _value(node, keys[0])
    if value is None or (len(keys) == 1 and not _is_path(name, value, _value(node, "path") or usual)):
        return node
    new = _changed(value, keys[1:], f"{path}.{name}", usual, change)
    if new == value:
        return node
    return {**node, name: new} if isinstance(node, dict) else replace(node, **{name: new})


def _value(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, dict) else getattr(node, name, None)


def _is_path(name: str, value: Any, path: str | None) -> bool:
    """Files are chosen inside of `path`, unless that is the name of their format; `plain` is a template, not a file."""
    if name == "data_files":
        return path in BUILDERS
    return value not in BUILDERS if name == "path" else (name, value) != ("chat_template", "plain")
