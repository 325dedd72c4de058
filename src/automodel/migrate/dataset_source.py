"""Where a script's dataset comes from: the chain from `train_dataset=` back to `load_dataset(…)`.

Steps of the chain that only tokenise, shuffle, rename or choose columns are what a config says in other words. Steps
that change which rows there are, or make them, are reported with their line.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from automodel.data.permitted import builder_refused, is_address, is_refused_builder
from automodel.data.row_format import LabelPlace
from automodel.migrate.document import Document
from automodel.migrate.mapped import MappedFunction
from automodel.migrate.supervised import TEXTS
from automodel.migrate.values import Script, Unknown, name_of

SAME_ROWS = (
    "map", "with_format", "set_format", "remove_columns", "select_columns", "flatten_indices", "with_transform", "cast",
    "cast_column", "shuffle", "rename_column", "rename_columns", "class_encode_column",
)  # fmt: skip
FILE_KINDS = ("json", "csv", "text", "parquet")
COLUMNS = (
    "text_column", "text_pair_column", "label_column", "tokens_column", "source_column", "target_column",
    "messages_column",
)  # fmt: skip
READ_BY_NAME: dict[LabelPlace | None, tuple[str, tuple[str, ...]]] = {
    "document": ("label_column", ("label", "labels")),
    "token": ("label_column", ("label", "labels")),
    "next_token": ("messages_column", ("messages",)),
}
"""Columns that trainers find by their names, by where the labels of the task stand."""


class Renamed(NamedTuple):
    """One step of a chain that gives columns other names."""

    line: int
    before: dict[str, str]
    """The new name of each, and the one it had."""


@dataclass
class Found:
    """What is known of a dataset, from the end of its chain to the beginning."""

    split: str | None = None
    limit: int | None = None
    renamed: list[Renamed] = field(default_factory=list)
    maps: list[tuple[ast.Call, int]] = field(default_factory=list)
    """Calls of `map`, each with the number of renames that come after it."""

    def original(self, column: str, later: int = 0) -> str:
        """What the data calls a column that is read where so many renames are still to come."""
        for step in self.renamed[later:]:
            column = step.before.get(column, column)
        return column


class DatasetReader:
    """Writes the `dataset` and `validation_dataset` sections of a document."""

    def __init__(self, script: Script, document: Document):
        self.script, self.document = script, document
        self.trained_on = Found()

    def read(self, node: ast.expr, line: int, section: str) -> None:
        found = Found()
        call = self._origin(node, line, found)
        if call is None:
            return
        try:
            self._section(call, found, section)
        except Unknown as unknown:
            self.document.block(unknown.line, f"{section}: {unknown.text}")
        if section == "dataset":
            self.trained_on = found
            for mapped, later in found.maps:
                MappedFunction(self.script, self.document, mapped, partial(found.original, later=later)).read()

    def name_columns(self) -> None:
        """Columns that are read under names that the script gave them, once everything else is known."""
        found, document = self.trained_on, self.document
        inner = document.values.get("dataset")
        if isinstance(inner, dict) and inner.get("text_column", ("", ""))[1] in TEXTS:
            field = inner["text_column"]
            document.set("dataset.text_column", found.original(field[0]), field[1])
        key, names = READ_BY_NAME.get(document.labels, ("", ()))
        given = {new for step in found.renamed for new in step.before}
        for name in names:
            if name in given:
                document.set(f"dataset.{key}", found.original(name), "rename_column")
        named = [document.get(f"dataset.{key}") for key in COLUMNS]
        for later, step in enumerate(found.renamed):
            for new, old in step.before.items():
                if found.original(new, later) not in named:
                    document.drop(step.line, f"the column {old!r} is not renamed to {new!r}: nothing is read from it")

    def _origin(self, node: ast.expr | None, line: int, found: Found) -> ast.Call | None:
        """The call of `load_dataset` at the beginning of the chain."""
        for _ in range(100):
            if isinstance(node, ast.Name):
                before = self.script.before(node.id, line)
                if before is None:
                    self.document.block(line, f"the dataset: {self.script.why_unknown(node.id, line)}")
                    return None
                line, node = before
            elif isinstance(node, ast.Subscript):
                try:
                    key = self.script.value(node.slice, line)
                except Unknown as unknown:
                    self.document.block(unknown.line, f"a part of a dataset: {unknown.text}")
                    return None
                found.split, node = str(key), node.value  # of the hub's, or of a train_test_split
            elif isinstance(node, ast.Call) and name_of(node) == "load_dataset":
                return node
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self._step(node, found):
                node = node.func.value
            else:
                text = ast.unparse(node)[:60] if node is not None else "nothing"
                self.document.block(line, f"rows come from `{text}`, which only the script can make")
                return None
        return None

    def _step(self, call: ast.Call, found: Found) -> bool:
        """Whether a method of a dataset is understood."""
        name = name_of(call)
        if name == "map":
            found.maps.append((call, len(found.renamed)))
        elif name in ("rename_column", "rename_columns"):
            return self._rename(call, found)
        elif name == "select":
            found.limit = self._range(call)
            return found.limit is not None
        elif name == "shuffle" and found.limit is not None:
            self.document.note(call.lineno, "shuffle(…) before select(…): the first rows are taken, not a random draw")
        elif name == "train_test_split":
            return found.split is not None and self._share(call, found)
        return name in SAME_ROWS

    def _rename(self, call: ast.Call, found: Found) -> bool:
        """`rename_column("old", "new")` or `rename_columns({"old": "new"})`."""
        try:
            given = [self.script.value(value) for value in (*call.args, *(k.value for k in call.keywords))]
        except Unknown:
            return False
        if len(given) == 1 and isinstance(given[0], dict):
            pairs = list(given[0].items())
        elif len(given) == 2:
            names = [k.arg for k in call.keywords]
            pairs = [tuple(reversed(given) if names[:1] == ["new_column_name"] and len(names) == 2 else given)]
        else:
            return False
        found.renamed.append(Renamed(call.lineno, {str(new): str(old) for old, new in pairs}))
        return True

    def _range(self, call: ast.Call) -> int | None:
        """`select(range(1000))`: how many rows from the first on."""
        rows = call.args[0] if call.args else None
        if not isinstance(rows, ast.Call) or name_of(rows) != "range" or len(rows.args) != 1:
            return None
        try:
            return int(self.script.value(rows.args[0]))
        except (Unknown, TypeError, ValueError):
            return None

    def _share(self, call: ast.Call, found: Found) -> bool:
        sizes = [k.value for k in call.keywords if k.arg == "test_size"] or call.args[:1]
        try:
            size = self.script.value(sizes[0]) if sizes else 0.25
        except Unknown:
            return False
        if not isinstance(size, float) or not 0 < size < 1:
            return False
        percent = round(100 * (1 - size))
        found.split = f"[:{percent}%]" if found.split == "train" else f"[{percent}%:]"
        self.document.note(call.lineno, "train_test_split: the last rows are held out, not a random draw")
        return True

    def _section(self, call: ast.Call, found: Found, section: str) -> None:
        given = dict(zip(("path", "name"), (self.script.value(arg) for arg in call.args)))
        given |= {k.arg: self.script.value(k.value) for k in call.keywords if k.arg}
        path, files = given.get("path"), given.get("data_files")
        names = given.get("column_names") or given.get("names") if path == "csv" else None
        split = given.get("split")
        if is_refused_builder(str(path)):
            raise Unknown(call.lineno, builder_refused(str(path)))
        if found.split is not None and found.split.startswith("["):
            split = f"{split or 'train'}{found.split}"
        elif found.split is not None:
            split = found.split
        if path in FILE_KINDS and files is not None:
            if isinstance(files, dict):
                files = files.get((split or "train").split("[")[0])
            files = files[0] if isinstance(files, list) and len(files) == 1 else files
            if not isinstance(files, str):
                raise Unknown(call.lineno, "several data_files; give one path for each dataset section")
            if is_address(files):
                self.document.note(call.lineno, f"{section}: it is fetched only with --allow-remote-data")
            else:
                path, files = files, None
            split = split if split and "[" in split else None
        self.document.set(f"{section}.path", path, f"line {call.lineno}")
        for key, value in (("name", given.get("name")), ("split", split), ("data_files", files)):
            if value is not None:
                self.document.set(f"{section}.{key}", value, "")
        if names and given.get("header") not in (None, "infer"):
            raise Unknown(call.lineno, "names in the place of those that the file has; rename the columns in the file")
        if names:
            self.document.set(f"{section}.column_names", list(names), f"line {call.lineno}")
        if found.limit is not None:
            self.document.set(f"{section}.num_samples_limit", found.limit, "select")
        if given.get("streaming"):
            self.document.set(f"{section}.streaming", True, "")
