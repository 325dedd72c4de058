"""Files into trees: YAML, and JSON with comments.

PyYAML only composes here: no tag is resolved, no object is constructed, so a file is never more than text with a
shape. Everything a file can get wrong before types matter is said in this module.
"""

from __future__ import annotations

import copy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from automodel.config.complaints import Complaints
from automodel.config.tree import (
    COMMAND_LINE,
    MOST_LEVELS,
    Entry,
    Listing,
    Mapping,
    Node,
    Place,
    Scalar,
    letter_fault,
    whole_letters,
)

# Expanding aliases of aliases grows exponentially; no honest config is anywhere near these sizes.
MOST_NODES = 20_000
MOST_BYTES = 1 << 20
TOO_MANY = f"there are more than {MOST_NODES:,} values. Is this a config, or the data?"
NO_MAPPING = "takes the keys of another mapping over, as in `<<: *defaults`; this is none. Remove it."
ENDLESS = "the file's `*aliases` repeat without end. Write the values out."
TOO_DEEP = f"keys and lists lie inside each other more than {MOST_LEVELS} times. Is a bracket not closed?"
LONGEST_KEY = 200
SHOWN = 160  # letters of a line, around the place that is wrong
CONFIG_SUFFIXES = {".yaml", ".yml", ".json"}


class _TooMuch(yaml.MarkedYAMLError):
    """YAML that is well formed, and larger or deeper than any config."""


class _Composer(yaml.SafeLoader):
    """Composes without guessing types, so that scalars keep their text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own class attribute)

    def __init__(self, stream: str):
        super().__init__(stream)
        self.levels = self.nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As PyYAML does it, by recursion, but not without end."""
        is_key = isinstance(parent, yaml.MappingNode) and index is None
        self.levels += 1
        self.nodes += not is_key
        fault = TOO_DEEP if self.levels > MOST_LEVELS else TOO_MANY if self.nodes > MOST_NODES else ""
        if fault:
            raise _TooMuch(problem=fault, problem_mark=self.peek_event().start_mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self.levels -= 1


_DEFAULT_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}

# What PyYAML says, and what it means to a person.
_SYNTAX = [
    (
        "mapping values are not allowed",
        "there is a second `key: value` on this line. Check the indentation, and quote a value that contains `: `.",
    ),
    ("'\\t' that cannot start any token", "there is a tab here. YAML indents with spaces only."),
    (
        "expected <block end>",
        "the indentation does not line up with the lines above. Indent it as far as the keys that it belongs to.",
    ),
    ("could not find expected ':'", "this line is neither `key: value` nor a list item. Is a colon missing?"),
    ("found unexpected end of stream", "a quote is opened and never closed. Close it."),
    ("expected ',' or ']'", "a `[` is opened and not closed, or a comma is missing in the list."),
    ("expected ',' or '}'", "a `{` is opened and not closed, or a comma is missing in the mapping."),
    (
        "found another document",
        "there is a second document (`---`). Put it in a file of its own and give both with `-c`.",
    ),
    ("found undefined alias", "this `*name` has no `&name` above it."),
    ("that cannot start any token", "a value cannot start with this character. Put the value in quotes."),
]


class _Reader:
    """Turns PyYAML's nodes of one file into ours, collecting problems."""

    def __init__(self, name: str, layer: int, complaints: Complaints):
        self.name, self.layer, self.complaints = name, layer, complaints
        self.endless = False
        self.count = 0
        self.open: set[int] = set()

    def place(self, mark: yaml.Mark | None) -> Place:
        return Place(self.layer, mark.line + 1 if mark else 0, self.name)

    def convert(self, node: yaml.Node, path: str) -> Node | None:
        place = self.place(node.start_mark)
        self.count += 1
        if self.count > MOST_NODES or len(self.open) >= MOST_LEVELS or id(node) in self.open:
            if not self.endless:
                self.endless = True
                self.complaints.add(place, path, ENDLESS)
            return None
        if node.tag not in _DEFAULT_TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.complaints.add(
                place, path, f"the YAML tag `{tag}` is not used here. Remove it and write the plain value."
            )
            return None
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.ScalarNode):
                return Scalar(whole_letters(node.value), plain=node.style is None, place=place)
            if isinstance(node, yaml.SequenceNode):
                items = [self.convert(child, f"{path}.{i}") for i, child in enumerate(node.value)]
                return Listing([item for item in items if item is not None], place)
            assert isinstance(node, yaml.MappingNode)
            return self.mapping(node, path, place)
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: str, place: Place) -> Mapping:
        entries: dict[str, Entry] = {}
        inherited: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            key_place = self.place(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                self.complaints.add(key_place, path, "a key must be a plain name. Write `name: value`.")
                continue
            key = whole_letters(key_node.value)
            if fault := letter_fault(key):
                self.complaints.add(key_place, path, f"the key {key!a} {fault}")
                continue
            if len(key) > LONGEST_KEY:
                self.complaints.add(
                    key_place, path, f"the key `{key[:40]}…` has {len(key):,} letters; no key is so long. Shorten it."
                )
                continue
            key_path = f"{path}.{key}" if path else key
            if key in entries:
                first = entries[key].place
                self.complaints.add(
                    key_place, key_path, f"is given twice; the first one is on line {first.line}. Keep one."
                )
                continue
            value = self.convert(value_node, key_path)
            if value is None:
                continue
            if key == "<<":  # YAML's merge key: `<<: *defaults`
                for base in value.items if isinstance(value, Listing) else [value]:
                    if isinstance(base, Mapping):
                        inherited = {**copy.deepcopy(base.entries), **inherited}
                    else:
                        self.complaints.add(base.place, key_path, NO_MAPPING)
                continue
            entries[key] = Entry(key, value, key_place)
        return Mapping({**inherited, **entries}, place)


def _caret(lines: list[str], mark: yaml.Mark) -> str:
    if mark.line >= len(lines):
        return ""
    start = max(0, mark.column - SHOWN // 2)
    line = lines[mark.line][start : start + SHOWN].replace("\t", "→")
    return f"\n      {line}\n      {' ' * (mark.column - start)}^"


def _complain_of_syntax(error: yaml.YAMLError, text: str, name: str, layer: int, complaints: Complaints) -> None:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        complaints.add(
            Place(layer, 0, name), "", f"is not readable as text ({str(error).splitlines()[0]}). Save it as UTF-8."
        )
        return
    mark = error.problem_mark
    if isinstance(error, _TooMuch):
        complaints.add(Place(layer, mark.line + 1, name), "", str(error.problem))
        return
    said = error.problem or ""
    meaning = next((m for pattern, m in _SYNTAX if pattern in said), f"the YAML is not well formed: {said}.")
    # Where a quote, a bracket or a key begins helps more than where the reader gave up on it.
    if error.context_mark is not None and any(word in meaning for word in ("never closed", "not closed", "colon")):
        mark = error.context_mark
    complaints.add(Place(layer, mark.line + 1, name), "", meaning + _caret(text.splitlines(), mark))


def _without_json_comments(text: str) -> str:
    """`//` and `#` comments and tabs become spaces, outside strings, so that lines and columns stay."""
    out, in_string, i = [], False, 0
    while i < len(text):
        char = text[i]
        if in_string:
            if char == "\\":
                out.append(text[i : i + 2])
                i += 2
                continue
            in_string = char != '"'
        elif char == '"':
            in_string = True
        elif char == "#" or text.startswith("//", i):
            end = text.find("\n", i)
            end = len(text) if end < 0 else end
            out.append(" " * (end - i))
            i = end
            continue
        elif char == "\t":
            char = " "
        out.append(char)
        i += 1
    return "".join(out)


def read_text(text: str, name: str, layer: int, complaints: Complaints) -> Node | None:
    """A YAML text as a tree; None where it is empty or not YAML."""
    try:
        composed = yaml.compose(text, Loader=_Composer)
    except yaml.YAMLError as error:
        _complain_of_syntax(error, text, name, layer, complaints)
        return None
    return None if composed is None else _Reader(name, layer, complaints).convert(composed, "")


def read_file(path: str | Path, layer: int, complaints: Complaints) -> Mapping | None:
    """One config file as a mapping, or None and the reason among the complaints."""
    file, place = Path(path), Place(layer, 0, str(path))
    before = len(complaints)
    text = _text_of(file, place, complaints)
    if text is None:
        return None
    if file.suffix == ".json":
        text = _without_json_comments(text)
    node = read_text(text, str(path), layer, complaints)
    if len(complaints) > before:
        return node if isinstance(node, Mapping) else None
    if node is None:
        complaints.add(place, "", "is empty. The smallest config names a model and a dataset.")
    elif not isinstance(node, Mapping):
        kind = "a list" if isinstance(node, Listing) else f"only the text {node.text[:40]!r}"
        complaints.add(node.place, "", f"a config is `key: value` lines such as `model: …`; this is {kind}.")
    else:
        return node
    return None


def _text_of(file: Path, place: Place, complaints: Complaints) -> str | None:
    if file.is_dir():
        inside = sorted(p.name for p in file.iterdir() if p.suffix in CONFIG_SUFFIXES)
        found = f" It holds {', '.join(inside[:5])}." if inside else ""
        complaints.add(place, "", f"is a folder, not a config file.{found}")
    elif not file.exists():
        complaints.add(place, "", f"there is no such file in {file.absolute().parent}.{_similar_files(file)}")
    else:
        try:
            with open(file, "rb") as opened:
                content = opened.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                complaints.add(place, "", f"is larger than {MOST_BYTES:,} bytes. Is this a config, or the data?")
                return None
            return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            complaints.add(place, "", f"is not UTF-8 text (at byte {error.start}). Is it a YAML file?")
        except OSError as error:
            complaints.add(place, "", f"cannot be read: {error.strerror}.")
    return None


def _similar_files(file: Path) -> str:
    if not file.absolute().parent.is_dir():
        return ""
    names = [p.name for p in file.absolute().parent.iterdir() if p.suffix in CONFIG_SUFFIXES]
    close = get_close_matches(file.name, names, n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


def read_value(text: str, layer: int) -> Node:
    """A value typed on the command line. Lists, mappings and quoted text are YAML; anything else is taken as it is."""
    place = Place(layer, 0, COMMAND_LINE)
    if text[:1] in "[{\"'" and text:
        complaints = Complaints()  # what does not parse is not YAML, just text that starts with a bracket
        node = read_text(text, COMMAND_LINE, layer, complaints)
        if node is not None and not len(complaints):
            if not isinstance(node, Scalar):
                node.text = text
            return node
    return Scalar(text, plain=True, place=place)
