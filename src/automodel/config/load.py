"""Files, settings and the environment into one frozen value, or every reason why not.

The way of a config: each file becomes a tree (read.py); its keys get their real names and the trees are laid over
each other, the command line's settings last (layers.py, overrides.py); variables are filled in (environment.py);
every value is fitted to its field's type (values.py) and every `_target_` passes the gate (gate.py). Problems are
collected all the way and reported together, in the order of the files.

`wandb:` with nothing after it is the section with its defaults; `wandb: null` takes the section away.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from automodel.config.complaints import Complaints
from automodel.config.dump import dump_config
from automodel.config.environment import fill
from automodel.config.fields import Field, choices, fields_of, takes_extra
from automodel.config.flat_settings import (
    FlatFile,
    deciding_key,
    fill_defaults,
    in_words,
    is_complete,
    sorted_into_sections,
)
from automodel.config.foreign import refuse_other_tools
from automodel.config.gate import check_section, check_trust
from automodel.config.holes import Hole, complain_of_holes, take_holes
from automodel.config.layers import Normaliser, join, merge, take_twins_away
from automodel.config.names import listing
from automodel.config.overrides import setting_layer
from automodel.config.read import read_file
from automodel.config.section import Section, Typed, WholeFile
from automodel.config.tree import (
    COMMAND_LINE,
    Entry,
    Listing,
    Mapping,
    Node,
    Place,
    Scalar,
    is_null,
    to_python,
    to_typed,
    walk,
)
from automodel.config.values import Misfit, check_untyped, fit, got
from automodel.config.written import note_used

__all__ = ["Loaded", "dump_config", "load_config", "read_config"]

T = TypeVar("T", bound=Section)


@dataclass
class Loaded(Generic[T]):
    """What came out of loading: a config, the complaints, and where each key was written.

    With complaints, `config` holds defaults in the bad places: good enough to look for further problems, never to
    run. It is None where a file could not be read at all.
    """

    config: T | None
    complaints: Complaints
    places: dict[str, Place]
    first_file: str
    bad: set[str]
    """Paths, in field names, whose values are missing or do not fit."""
    flat: tuple[str, ...] = ()
    """How files with flat settings were read, and what was added to them."""

    def is_bad(self, path: str) -> bool:
        """Whether the key, a section around it or a key in it has been complained about already."""
        around = any(path == bad or path.startswith(f"{bad}.") for bad in self.bad)
        said = self.complaints.about(path) or self.complaints.inside(path)
        return around or said or self.complaints.suggests(path.rpartition(".")[2])

    def place_of(self, path: str) -> Place:
        """Where a key was written, or the section around it, or the first file."""
        while path:
            if path in self.places:
                return self.places[path]
            path = path.rpartition(".")[0]
        return Place(0, 0, self.first_file)


def load_config(
    schema: type[T], files: Sequence[str | Path], overrides: Sequence[str] = (), trust: Sequence[str] = ()
) -> T:
    """The files laid over each other, then the overrides, as one validated `schema`. Raises `ConfigError`."""
    loaded = read_config(schema, files, overrides, trust)
    loaded.complaints.raise_if_any()
    assert loaded.config is not None
    return loaded.config


def read_config(
    schema: type[T], files: Sequence[str | Path], overrides: Sequence[str] = (), trust: Sequence[str] = ()
) -> Loaded[T]:
    """As `load_config`, but hands the complaints back instead of raising them."""
    check_trust(trust)
    complaints = Complaints()
    first_file = str(files[0]) if files else COMMAND_LINE
    keys = Normaliser(schema, complaints)
    tree = Mapping({}, Place(0, 0, first_file))
    readable = True
    flat: list[FlatFile] = []
    holes: list[Hole] = []
    for layer, file in enumerate(files):
        raw = read_file(file, layer, complaints)
        readable = readable and raw is not None
        if raw is None:
            continue
        refuse_other_tools(str(file), raw.entries)
        because = deciding_key(raw, str(file))
        normal = keys.normalise(raw if because is None else sorted_into_sections(raw), schema)
        if because is not None:
            flat.append(FlatFile(str(file), because, is_complete(normal)))
        holes += take_holes(normal)
        take_twins_away(tree, normal, schema)
        merge(tree, normal, schema, complaints)
    if not readable:  # half a config would only be blamed for what the other half sets
        return Loaded(None, complaints, {}, first_file, set())
    for text in overrides:
        setting = setting_layer(text, len(files), complaints)
        if setting is not None:
            normal = keys.normalise(setting, schema)
            holes += take_holes(normal)
            take_twins_away(tree, normal, schema)
            merge(tree, normal, schema, complaints)
    complain_of_holes(holes, tree, complaints)
    assumed = fill_defaults(tree, flat) if flat else []
    fill(tree, complaints)
    builder = _Builder(schema, tuple(trust), complaints)
    config = builder.build(schema, tree, "", "")
    if isinstance(config, WholeFile):
        config = cast(T, replace(config, typed=builder.typed))
    return Loaded(config, complaints, builder.places, first_file, builder.bad, tuple(in_words(flat, assumed)))


class _Builder:
    """Fits a normalised tree into dataclasses. `path` is made of field names, `spelt` of the user's own."""

    def __init__(self, root: type[Section], trust: tuple[str, ...], complaints: Complaints):
        self.root, self.trust, self.complaints = root, trust, complaints
        self.places: dict[str, Place] = {}
        self.bad: set[str] = set()
        self.typed: dict[str, Typed] = {}
        self.example_shown = False

    def build(self, section: type[T], mapping: Mapping, path: str, spelt: str) -> T:
        """The section with every value fitted; bad values are complained about and left at their defaults."""
        values: dict[str, Any] = {}
        for f in fields_of(section).values():
            entry = mapping.entries.get(f.name)
            inner, inner_spelt = join(path, f.name), join(spelt, entry.key if entry else f.key)
            if entry is not None:
                self.places[inner] = entry.place
            if f.section is not None:
                values[f.name] = self._nested(f, entry, mapping.place, inner, inner_spelt)
            elif f.items is not None and entry is not None and not is_null(entry.node):
                values[f.name] = self._items(f, entry, inner, inner_spelt)
            elif entry is not None:
                values[f.name] = self._leaf(f, entry, inner, inner_spelt)
            else:
                values[f.name] = self._absent(f, mapping.place, inner, inner_spelt)
        if takes_extra(section):
            values["extra"] = self._extra(section, mapping, path, spelt)
        config = section(**values)
        if section.SLOT is not None:
            self._gate(config, mapping, spelt)
        return config

    def _nested(self, f: Field, entry: Entry | None, place: Place, path: str, spelt: str) -> Any:
        assert f.section is not None
        if entry is not None and isinstance(entry.node, Mapping):
            return self.build(f.section, entry.node, path, spelt)
        if f.required:
            self.bad.add(path)
            self._missing(f, entry.place if entry else place, spelt)
            return f.section(**{inner.name: "" for inner in fields_of(f.section).values() if inner.required})
        return None if f.nullable else f.default

    def _items(self, f: Field, entry: Entry, path: str, spelt: str) -> tuple[Any, ...] | None:
        """A list of sections."""
        assert f.items is not None
        if not isinstance(entry.node, Listing):
            self.bad.add(path)
            self.complaints.add(entry.place, spelt, f"expected a list of sections, got {got(entry.node)}.")
            return None
        built = []
        for number, item in enumerate(entry.node.items):
            inner, inner_spelt = join(path, str(number)), join(spelt, str(number))
            if isinstance(item, Mapping):
                self.places[inner] = item.place
                built.append(self.build(f.items, item, inner, inner_spelt))
            else:
                keys = listing(f.items, 4)
                message = f"is a section with keys of its own ({keys}), not {got(item)}."
                self.bad.add(inner)
                self.complaints.add(item.place, inner_spelt, message)
        return tuple(built)

    def _absent(self, f: Field, place: Place, path: str, spelt: str) -> Any:
        if not f.required:
            return f.default
        self.bad.add(path)
        self._missing(f, place, spelt)
        return ""

    def _leaf(self, f: Field, entry: Entry, path: str, spelt: str) -> Any:
        try:
            value = fit(f.hint, entry.node, f.default)
            self._remember(entry.node, value, path, ours=bool(choices(f.hint)))
            return value
        except Misfit as misfit:
            self.bad.add(path)
            for inner, message, node in misfit.parts:
                self.complaints.add(node.place, join(spelt, inner) if inner else spelt, message)
            return "" if f.required else f.default

    def _extra(self, section: type[Section], mapping: Mapping, path: str, spelt: str) -> dict[str, Any]:
        entry = mapping.entries.get("extra")
        if entry is None:
            return {}
        values: dict[str, Any] = {}
        for argument in cast(Mapping, entry.node).entries.values():
            self.places[join(path, argument.key)] = argument.place
            if self._is_usable(section, argument, join(path, argument.key), join(spelt, argument.key)):
                values[argument.key] = to_python(argument.node)
                self._remember(argument.node, values[argument.key], join(path, argument.key))
        return values

    def _is_usable(self, section: type[Section], argument: Entry, path: str, spelt: str) -> bool:
        """Whether every value of an argument is a number that can be meant, as far as its name tells; complained about
        where it is not."""
        before = len(self.complaints)
        keyed = [(spelt, argument.key, argument.node)]
        while keyed:
            at, key, node = keyed.pop()
            hint = next((hint for name, hint in section.EXTRA.items() if re.fullmatch(name, key)), None)
            try:
                if hint is not None and not isinstance(node, Mapping):
                    fit(hint, node)
                elif isinstance(node, Scalar):
                    check_untyped(node)
            except Misfit as misfit:
                for inner, message, place in misfit.parts:
                    self.complaints.add(place.place, join(at, inner) if inner else at, message)
            if isinstance(node, Mapping):
                keyed += [(join(at, name), name, inner.node) for name, inner in node.entries.items()]
            elif isinstance(node, Listing):
                keyed += [(join(at, str(i)), "", inner) for i, inner in enumerate(node.items)]
        if len(self.complaints) > before:
            self.bad.add(path)
            return False
        return True

    def _remember(self, node: Node, value: Any, path: str, ours: bool = False) -> None:
        """How a value was typed, where variables were filled into it. Sentences have texts as they were typed; numbers
        and words of ours (`ours`) stand in many sentences that have nothing to do with a variable."""
        filled = [scalar.typed for _, scalar in walk(node) if isinstance(scalar, Scalar) and scalar.typed is not None]
        if not filled:
            return
        self.typed[path] = Typed(value=value, text=to_typed(node))
        if not ours and not isinstance(value, bool | int | float):
            note_used(" ".join(filled))

    def _gate(self, config: Section, mapping: Mapping, spelt: str) -> None:
        """The `_target_` and its arguments pass the gate, or are complained about at their own lines."""
        entries = {name: entry for name, entry in mapping.entries.items() if name != "extra"}
        if "extra" in mapping.entries:
            entries |= cast(Mapping, mapping.entries["extra"].node).entries
        for problem in check_section(config, given=set(entries), trust=self.trust):
            entry = entries.get(problem.path)
            place = entry.place if entry else mapping.place
            self.complaints.add(place, join(spelt, entry.key if entry else problem.path), problem.message)

    def _missing(self, f: Field, place: Place, spelt: str) -> None:
        if self.complaints.about(spelt) or self.complaints.suggests(f.key):
            return
        example = self.root.EXAMPLE.strip() if "." not in spelt else ""
        if example and not self.example_shown:
            self.example_shown = True
            lines = "".join(f"\n      {line}" for line in example.splitlines())
            self.complaints.add(place, spelt, f"is missing. The smallest config has three lines:{lines}")
        else:
            self.complaints.add(place, spelt, f"is missing: {f.doc[:1].lower()}{f.doc[1:]}")
