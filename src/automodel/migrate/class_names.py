"""Names that a script gives its classes: `id2label` and `label2id`, handed to `from_pretrained` or set afterwards.

Data of numbers has no names, so those of the script are written down where they are constants. Where they are read from
the data's own ClassLabel feature, so does a run, and nothing is lost. All others are listed with their line.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from automodel.migrate.document import Document
from automodel.migrate.script_words import CLASS_NAMES
from automodel.migrate.values import DEEPEST, Script, Unknown, dotted, name_of

ATTRIBUTES = tuple(f"config.{name}" for name in CLASS_NAMES)
WITHOUT_NAMES = (".csv", ".tsv", ".json", ".jsonl", ".txt")
"""Files that cannot name the numbers in them."""
SAME_NAMES = ("enumerate", "zip", "dict", "list", "tuple", "items", "str", "int")
"""What a list of names goes through and is still the same, in the same order."""


@dataclass(frozen=True)
class Given:
    """What stands for one of the two mappings."""

    what: str
    line: int
    node: ast.expr | None
    why: str = ""
    """Without a node: why it is not known."""


class ClassNames:
    """Collects the mappings of a script, and writes `model.id2label`."""

    def __init__(self, script: Script, document: Document):
        self.script, self.document = script, document
        self.found: dict[str, Given] = {}

    def in_call(self, keywords: Iterable[ast.keyword]) -> None:
        """What `from_pretrained` gets."""
        for keyword in keywords:
            if keyword.arg in CLASS_NAMES and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                self.found[keyword.arg] = Given(keyword.arg, keyword.value.lineno, keyword.value)

    def afterwards(self, models: set[str], line: int) -> None:
        """`model.config.id2label = …`, which takes the place of what was given before; `line`: where the model is."""
        nodes = [node for node in ast.walk(self.script.tree) if isinstance(node, ast.stmt)]
        for node in sorted(nodes, key=lambda n: n.lineno):
            for target, path, value in _settings(node):
                root, _, attribute = path.partition(".")
                if root not in models or attribute not in ATTRIBUTES:
                    continue
                what, why = f"model.{attribute}", ""
                if isinstance(target, ast.Subscript) or value is None:
                    why = "is changed item by item"
                elif not self._happens(node.lineno, line):
                    why = "is set in a branch, a loop or another function"
                self.found[attribute.removeprefix("config.")] = Given(
                    what, target.lineno, None if why else value, f"{what} {why}"
                )

    def write(self) -> None:
        given = self.found.get("id2label") or self.found.get("label2id")
        if given is None:
            return
        if self.document.labels not in ("document", "token"):
            self.document.drop(given.line, f"{given.what}: only a classifier has names of classes")
            return
        try:
            names = self._names(given)
        except Unknown as unknown:
            if given.node is None or not self._of_the_data(given.node, given.line):
                text = unknown.text if given.node is None else f"{given.what}: {unknown.text}"
                self.document.drop(given.line, f"{text}; classes are called as in the data, or LABEL_0, LABEL_1, …")
            return
        self.document.set("model.id2label", names, f"line {given.line}")
        self._compare(names)
        if Path(str(self.document.get("dataset.path"))).suffix not in WITHOUT_NAMES:
            self.document.note(
                given.line, f"{given.what}: a run refuses it where the dataset has other names (ClassLabel); remove "
                "model.id2label there",
            )  # fmt: skip

    def _happens(self, line: int, model: int) -> bool:
        """Whether a line is reached whenever the trainer's is."""
        places = self.script.bindings.places
        (scope, branches), (own, around) = places[line], places.get(model, (self.script.bindings.module, ()))
        return scope in (own, self.script.bindings.module) and around[: len(branches)] == branches

    def _names(self, given: Given) -> dict[int, str]:
        """The mapping from numbers to names; raises `Unknown` with what is wrong with it."""
        if given.node is None:
            raise Unknown(given.line, given.why)
        mapping = self.script.value(given.node)
        try:
            pairs = mapping.items() if given.what.endswith("id2label") else [(i, n) for n, i in mapping.items()]
            names = {int(number): str(name) for number, name in sorted(pairs, key=lambda pair: int(pair[0]))}
        except (AttributeError, TypeError, ValueError):
            names = {}
        if not names or list(names) != list(range(len(mapping))) or len(set(names.values())) < len(names):
            raise Unknown(given.line, "it must number different names from 0 on")
        count = self.document.get("model.num_labels")
        if count not in (None, len(names)):
            raise Unknown(given.line, f"it names {len(names)} classes, but num_labels is {count}")
        return names

    def _compare(self, names: dict[int, str]) -> None:
        """The other mapping follows from `id2label`; one that says something else is not silently replaced."""
        other = self.found.get("label2id")
        try:
            if other is not None and self._names(other) != names:
                self.document.drop(other.line, f"{other.what}: its order is not that of id2label, which is kept")
        except Unknown:
            return

    def _of_the_data(self, node: ast.expr, line: int, depth: int = 0) -> bool:
        """Whether these are the names of a dataset's ClassLabel, as they are: a run reads the same ones."""
        if depth > DEEPEST:
            return False
        if isinstance(node, ast.Name):
            found = self.script.before(node.id, line)
            return found is not None and self._of_the_data(found[1], found[0], depth + 1)
        if isinstance(node, ast.DictComp):
            sources = [each.iter for each in node.generators] + [node.key, node.value]
            plain = all(isinstance(part, ast.Name) or self._same(part) for part in (node.key, node.value))
            return plain and any(self._of_the_data(part, line, depth + 1) for part in sources)
        if isinstance(node, ast.Call) and name_of(node) in SAME_NAMES:
            inner = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
            return any(self._of_the_data(part, line, depth + 1) for part in inner)
        if isinstance(node, ast.Call) and name_of(node) in ("int2str", "str2int"):
            node = node.func
        if isinstance(node, ast.Attribute | ast.Subscript):
            return (isinstance(node, ast.Attribute) and node.attr == "features") or self._of_the_data(
                node.value, line, depth + 1
            )
        return False

    def _same(self, node: ast.expr) -> bool:
        """`str(i)`, `names[i]`, `feature.int2str(i)`: a number or a name, unchanged."""
        return isinstance(node, ast.Subscript) or name_of(node) in ("str", "int", "int2str", "str2int")


def _settings(node: ast.stmt) -> Iterable[tuple[ast.expr, str, ast.expr | None]]:
    """Attributes that a statement sets, whole or in part: where, their path, and to what (None: it is not plain)."""
    pairs: list[tuple[ast.expr, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs += zip(target.elts, node.value.elts)
            else:
                pairs.append((target, node.value))
    elif isinstance(node, ast.AnnAssign):
        pairs.append((node.target, node.value))
    elif isinstance(node, ast.AugAssign):
        pairs.append((node.target, None))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and name_of(node.value) == "setattr":
        given = node.value.args
        if len(given) == 3 and isinstance(given[1], ast.Constant):
            yield node.value, f"{dotted(given[0])}.{given[1].value}", given[2]
    for target, value in pairs:
        yield target, dotted(target.value if isinstance(target, ast.Subscript) else target), value
