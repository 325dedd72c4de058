"""Trees with their keys put right, and one laid over another.

`normalise` gives every key its field's name, writes short forms out (`model: bert`), sends arguments of a `_target_`
to `extra` and complains about everything else. After it, `merge` needs no schema beyond list defaults: mappings merge
key by key, anything else replaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from automodel.config.complaints import Complaints
from automodel.config.fields import Field, fields_of, takes_extra
from automodel.config.gate import canonical
from automodel.config.names import advice, listing
from automodel.config.section import Section
from automodel.config.tree import (
    COMMAND_LINE,
    Entry,
    Listing,
    Mapping,
    Node,
    Scalar,
    entry_at,
    is_empty,
    is_null,
    item_number,
    walk,
)
from automodel.config.values import got, show

NO_TARGET = "nothing here takes a `_target_`. Remove it; only the sections that say so build objects."
NO_TRUST = (
    "a file cannot widen what is trusted, since it may come from anywhere. Remove it and add "
    "`--trust my_package` to the command line."
)
NO_REMOTE_DATA = (
    "a file cannot have anything fetched, since it may come from anywhere. Remove it and add "
    "`--allow-remote-data` to the command line."
)


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


class Normaliser:
    """Puts the keys of one schema's trees right."""

    def __init__(self, root: type[Section], complaints: Complaints):
        self.root, self.complaints = root, complaints

    def normalise(self, raw: Mapping, section: type[Section], path: str = "") -> Mapping:
        """The mapping with every key under its field's name and every nested section in its long form."""
        out = Mapping({}, raw.place, text=raw.text)
        moved = []
        for entry in _inlined(raw, section):
            if entry.key in section.HOMES:
                moved.append(entry)
                continue
            name = self._field_name(entry, section, path)
            if name is None:
                continue
            key_path = join(path, entry.key)
            if name == "extra":
                self._refuse_nested_targets(entry.node, key_path)
                extra = out.entries.setdefault("extra", Entry("extra", Mapping({}, raw.place), raw.place))
                cast(Mapping, extra.node).entries[entry.key] = entry
            elif name in out.entries:
                other = out.entries[name].key
                message = f"is another name for `{other}`, which is given too. Keep one."
                self.complaints.add(entry.place, key_path, message)
            else:
                node = self._long_form(entry, fields_of(section)[name], key_path)
                if node is not None:
                    out.entries[name] = Entry(entry.key, node, entry.place)
        for entry in moved:
            self._move_home(entry, section.HOMES[entry.key], out)
        return out

    def _move_home(self, entry: Entry, home: str, out: Mapping) -> None:
        """Puts a key that was written at the top level where it belongs, unless that is taken."""
        outer, _, inner = home.partition(".")
        small = Mapping({inner: Entry(inner, entry.node, entry.place)}, entry.place)
        normal = self.normalise(Mapping({outer: Entry(outer, small, entry.place)}, entry.place), self.root)
        present = out.entries.get(outer)
        if present is not None and isinstance(present.node, Mapping):
            given = cast(Mapping, normal.entries[outer].node).entries
            taken = next((key for key in given if key in present.node.entries), None)
            if taken is not None:
                message = f"is another name for `{outer}.{taken}`, which is given too. Keep one."
                self.complaints.add(entry.place, entry.key, message)
                return
        merge(out, normal, self.root, self.complaints)

    def _field_name(self, entry: Entry, section: type[Section], path: str) -> str | None:
        """The field an entry sets, `extra` for an argument of the target, or nothing and a complaint."""
        key, known = entry.key, fields_of(section)
        if key.replace("-", "_") == "allow_remote_data":
            typed = entry.place.name == COMMAND_LINE
            message = "is an option of its own: `--allow-remote-data`." if typed else NO_REMOTE_DATA
            self.complaints.add(entry.place, join(path, key), message)
            return None
        if key == "_target_" and "target" in known:
            return "target"
        if section.ALIASES.get(key, key) in known and key != "target":
            return section.ALIASES.get(key, key)
        if takes_extra(section) and key not in ("extra", "target", "_target_"):
            return "extra"
        message = self._refusal(section, key, path)
        if message is NO_TRUST and entry.place.name == COMMAND_LINE:
            message = "is an option of its own: `--trust my_package`."
        self.complaints.add(entry.place, join(path, key), message)
        return None

    def _refusal(self, section: type[Section], key: str, path: str) -> str:
        if key == "_target_":
            return NO_TARGET
        if key == "trust" and section is self.root:
            return NO_TRUST
        if key == "target" and "target" in fields_of(section):
            return "is spelt `_target_`."
        if key == "extra" and takes_extra(section):
            return "write these keys directly into the section, without `extra:`."
        guess = advice(self.root, section, key)
        if guess:
            return f"there is no such key; {guess}"
        return f"there is no such key; the keys {'of this section' if path else 'here'} are {listing(section, 30)}."

    def _long_form(self, entry: Entry, f: Field, path: str) -> Node | None:
        """The entry's value, a section's short forms written out."""
        node = entry.node
        if f.items is not None:
            return self._long_items(node, f.items, path)
        if f.section is None:
            self._refuse_nested_targets(node, path)
            return node
        if is_empty(node):
            return Mapping({}, node.place)
        if is_null(node):
            return node
        if isinstance(node, Mapping):
            return self.normalise(node, f.section, path)
        short = f.section.SHORTHAND
        if short and isinstance(node, Scalar):
            return Mapping({short: Entry(short, node, entry.place)}, node.place)
        switch = ""
        if f.nullable:
            switch = f" `{entry.key}: {{}}` turns it on with its defaults, `{entry.key}: null` turns it off."
        keys = listing(f.section, 4)
        self.complaints.add(entry.place, path, f"is a section with keys of its own ({keys}), not {got(node)}.{switch}")
        return None

    def _long_items(self, node: Node, section: type[Section], path: str) -> Node:
        """A list of sections, or (on the command line) items of it by their numbers, each in its long form."""

        def long(item: Node, number: str) -> Node:
            if isinstance(item, Mapping):
                return self.normalise(item, section, join(path, number))
            if section.SHORTHAND and isinstance(item, Scalar) and not is_null(item):
                return Mapping({section.SHORTHAND: Entry(section.SHORTHAND, item, item.place)}, item.place)
            return item

        if isinstance(node, Listing):
            return Listing([long(item, str(number)) for number, item in enumerate(node.items)], node.place, node.text)
        if isinstance(node, Mapping) and node.entries and all(item_number(key) is not None for key in node.entries):
            items = {key: Entry(key, long(entry.node, key), entry.place) for key, entry in node.entries.items()}
            return Mapping(items, node.place, text=node.text)
        return node

    def _refuse_nested_targets(self, node: Node, path: str) -> None:
        for inner, at in walk(node, path):
            if isinstance(at, Mapping) and "_target_" in at.entries:
                self.complaints.add(at.entries["_target_"].place, f"{inner}._target_", NO_TARGET)


def _inlined(raw: Mapping, section: type[Section]) -> Iterator[Entry]:
    """The entries of a mapping, with those of its inlined mappings among them."""
    for entry in raw.entries.values():
        if entry.key in section.INLINE and (isinstance(entry.node, Mapping) or is_null(entry.node)):
            yield from entry.node.entries.values() if isinstance(entry.node, Mapping) else ()
        else:
            yield entry


def merge(under: Mapping, over: Mapping, section: type[Section] | None, complaints: Complaints, path: str = "") -> None:
    """Lays `over` on `under`, in place.

    A different `_target_` keeps the keys the section itself knows and drops the arguments meant for the old target.
    """
    if target_name(under) and target_name(over) and target_name(under) != target_name(over):
        under.entries.pop("extra", None)
    for name, entry in over.entries.items():
        f = fields_of(section).get(name) if section else None
        current = under.entries.get(name)
        usual = section.USUAL.get(name, f.default) if section and f else None
        items = _list_to_change(current, entry, usual)
        inner = path if name == "extra" else join(path, entry.key)
        if items is not None:
            _set_items(items, cast(Mapping, entry.node), complaints, inner)
            under.entries[name] = Entry(entry.key, items, entry.place)
        elif (
            current is not None
            and isinstance(current.node, Mapping)
            and isinstance(entry.node, Mapping)
            and entry.node.text is None  # `'dataset={path: x}'` on the command line sets the whole section
        ):
            merge(current.node, entry.node, f.section if f else None, complaints, inner)
            under.entries[name] = Entry(entry.key, current.node, entry.place)
        else:
            under.entries[name] = entry


def take_twins_away(under: Mapping, over: Mapping, section: type[Section]) -> None:
    """Of two names of one setting, removes from `under` the one that `over` gives by the other name. Settings of one
    command line are one source: both names in it stay, and are complained about as in one file."""
    for pair in section.TWINS:
        for given, other in (pair, pair[::-1]):
            new, old = entry_at(over, given), entry_at(under, other)
            if new is None or old is None or is_null(new.node) or new.place.layer == old.place.layer:
                continue
            outer, _, inner = other.rpartition(".")
            cast(Mapping, under.entries[outer].node).entries.pop(inner)


def target_name(mapping: Mapping) -> str | None:
    entry = mapping.entries.get("target")
    return canonical(entry.node.text) if entry and isinstance(entry.node, Scalar) else None


def _list_to_change(current: Entry | None, entry: Entry, usual: Any) -> Listing | None:
    """The list that `wandb.tags.0=x` changes: the one given before, or what it is otherwise."""
    if not isinstance(entry.node, Mapping) or not entry.node.entries:
        return None
    if not all(item_number(key) is not None for key in entry.node.entries):
        return current.node if current and isinstance(current.node, Listing) else None
    if current is not None:
        return current.node if isinstance(current.node, Listing) else None
    if isinstance(usual, tuple):
        place = entry.place
        return Listing([Scalar(show(item), plain=True, place=place) for item in usual], place)
    return None


def _set_items(items: Listing, changes: Mapping, complaints: Complaints, path: str) -> None:
    count = len(items.items)
    for key, entry in changes.entries.items():
        number = item_number(key)
        if number is None:
            message = f"`{path}` is a list; name the item by its number, e.g. `{path}.0=…`."
            complaints.add(entry.place, join(path, key), message)
        elif number > count:
            size = f"the list has {count} item{'s' if count != 1 else ''}"
            complaints.add(entry.place, join(path, key), f"{size}; `{path}.{count}=…` adds one.")
        elif number < count and isinstance(items.items[number], Mapping) and isinstance(entry.node, Mapping):
            merge(cast(Mapping, items.items[number]), entry.node, None, complaints, join(path, key))
        else:
            items.items[number : number + 1] = [entry.node]
            count = len(items.items)
