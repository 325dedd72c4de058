"""What a script's `dataset.map(function)` does to rows.

Tokenising is what happens here anyway, so a function that only tokenises says which columns are read and where they are
cut. One that does anything else to texts or labels makes other rows, and every such line is reported.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from automodel.migrate.document import Document
from automodel.migrate.values import Script, Unknown, name_of

TOKENIZERS = ("tok", "encode_plus")
LABELS = ("labels", "label")


def is_tokenizer(call: ast.Call) -> bool:
    return "tokenizer" in name_of(call).lower() or name_of(call) in TOKENIZERS


class MappedFunction:
    """Reads one function into the document's `dataset` section."""

    def __init__(self, script: Script, document: Document, mapped: ast.Call, original: Callable[[str], str]):
        """`original`: what the data calls a column, by its name here."""
        self.script, self.document, self.mapped, self.original = script, document, mapped, original
        given = mapped.args[0] if mapped.args else next((k.value for k in mapped.keywords if k.arg == "function"), None)
        self.name = name_of(given) or "…"
        self.function: Any = script.functions.get(given.id) if isinstance(given, ast.Name) else given
        arguments = getattr(getattr(self.function, "args", None), "args", [])
        self.row = arguments[0].arg if arguments else ""

    def read(self) -> None:
        calls = [n for n in ast.walk(self.function) if isinstance(n, ast.Call)] if self.function is not None else []
        tokenizers = [call for call in calls if is_tokenizer(call)]
        if not tokenizers or not self.row:
            self.document.block(self.mapped.lineno, f"map({self.name}): what it does to rows is not understood")
            return
        aligned = "word_ids" in ast.unparse(self.function) and _has(tokenizers[0], "is_split_into_words")
        if aligned:
            self._aligned(tokenizers[0])
        elif isinstance(self.function, ast.FunctionDef):
            for statement in self.function.body:
                self._statement(statement)
        elif not self._tokenised(getattr(self.function, "body", None)):
            text = ast.unparse(self.function)[:60]
            self.document.block(self.mapped.lineno, f"`{text}`: what it does to rows is not understood")
        sources = [call for call in tokenizers if _texts_of(call)]
        if sources:
            self._texts(sources[0])
        for call in tokenizers:
            self._target(call, sources)

    # Statements.

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.Return) and (isinstance(node.value, ast.Name) or self._tokenised(node.value)):
            return
        if isinstance(node, ast.With) and "as_target_tokenizer" in ast.unparse(node.items[0]):
            for inner in node.body:
                self._statement(inner)
            return
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and self._assignment(node.targets[0], node.value):
            return
        text = ast.unparse(node).splitlines()[0][:60]
        self.document.block(node.lineno, f"`{text}`: what it does to rows is not understood")

    def _tokenised(self, node: ast.expr | None) -> bool:
        return isinstance(node, ast.Call) and is_tokenizer(node)

    def _assignment(self, target: ast.expr, value: ast.expr) -> bool:
        if isinstance(target, ast.Name):
            return self._tokenised(value) or self._column(value) is not None or self._prefixed(value) is not None
        if not (isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant)):
            return False
        if target.slice.value not in LABELS:
            return False
        column = self._column(value)
        if column is not None and self.document.labels in ("document", "token"):
            self.document.set("dataset.label_column", column, f"line {value.lineno}")
            return True
        return self._of_tokens(value)

    def _of_tokens(self, node: ast.expr) -> bool:
        """`result["input_ids"]`, or a copy of it: the labels of a language model, or a target's tokens."""
        while isinstance(node, ast.Call) and name_of(node) in ("copy", "deepcopy", "list"):
            node = node.args[0] if node.args else getattr(node.func, "value", node)
        if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)):
            return False
        return node.slice.value == "input_ids" and (isinstance(node.value, ast.Name) or self._tokenised(node.value))

    # Columns.

    def _column(self, node: ast.expr | None) -> str | None:
        """`examples["text"]`, or a name that holds it."""
        if isinstance(node, ast.Name):
            found = self.script.before(node.id, node.lineno)
            return self._column(found[1]) if found is not None else None
        direct = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == self.row
        return self.original(str(node.slice.value)) if direct and isinstance(node.slice, ast.Constant) else None

    def _prefixed(self, node: ast.expr | None) -> tuple[str, str] | None:
        """`["summarize: " + text for text in examples["document"]]`: the words before, and the column."""
        if isinstance(node, ast.Name):
            found = self.script.before(node.id, node.lineno)
            return self._prefixed(found[1]) if found is not None else None
        if not isinstance(node, ast.ListComp) or len(node.generators) != 1 or node.generators[0].ifs:
            return None
        each, part = node.generators[0], node.elt
        column = self._column(each.iter)
        plain = isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add) and isinstance(part.right, ast.Name)
        if column is None or not plain or ast.unparse(part.right) != ast.unparse(each.target):
            return None
        try:
            return str(self.script.value(part.left)), column
        except Unknown:
            return None

    def _texts(self, call: ast.Call) -> None:
        translates = self.document.labels == "target"
        plain = ("source_column",) if translates else ("text_column", "text_pair_column")
        keys = ("tokens_column",) if _has(call, "is_split_into_words") else plain
        for key, argument in zip(keys, _texts_of(call)):
            column, prefixed = self._column(argument), self._prefixed(argument) if translates else None
            if prefixed is not None:
                self.document.set("dataset.source_prefix", prefixed[0], f"line {call.lineno}")
                column = prefixed[1]
            if column is None:
                text = ast.unparse(argument)[:50]
                self.document.block(call.lineno, f"`{text}`: the text is put together in the script")
            else:
                self.document.set(f"dataset.{key}", column, f"line {call.lineno}")
        self._length(call, "dataset.max_length")
        cuts = next((k.value for k in call.keywords if k.arg == "truncation"), None)
        if self.document.labels == "next_token" and isinstance(cuts, ast.Constant) and cuts.value:
            self.document.set("dataset.on_long", "cut", "truncation")

    def _target(self, call: ast.Call, sources: list[ast.Call]) -> None:
        """`tokenizer(text_target=examples["summary"], max_length=64)`, or a second call for the target."""
        if self.document.labels != "target":
            return
        given = next((k.value for k in call.keywords if k.arg == "text_target"), None)
        if given is None and call in sources[1:]:
            given = _texts_of(call)[0]
        if given is None:
            return
        column = self._column(given)
        if column is None:
            self.document.block(call.lineno, "the target is put together in the script")
            return
        self.document.set("dataset.target_column", column, f"line {call.lineno}")
        if not sources or call is not sources[0]:
            self._length(call, "dataset.max_target_length")

    def _aligned(self, call: ast.Call) -> None:
        """Labels of words on their tokens: the same is done here."""
        self.document.note(call.lineno, "labels of words go to their first token; the others carry none")
        subscripts = [node for node in ast.walk(self.function) if isinstance(node, ast.Subscript)]
        read = {column for node in subscripts if (column := self._column(node)) is not None}
        others = read - {self._column(argument) for argument in _texts_of(call)}
        if len(others) == 1:
            self.document.set("dataset.label_column", others.pop(), f"line {call.lineno}")

    def _length(self, call: ast.Call, path: str) -> None:
        given = next((k.value for k in call.keywords if k.arg == "max_length"), None)
        if given is None:
            return
        try:
            self.document.set(path, self.script.value(given), "")
        except Unknown as unknown:
            self.document.block(unknown.line, f"max_length: {unknown.text}")


def _texts_of(call: ast.Call) -> list[ast.expr]:
    """What a tokenizer gets to read, by place or by name."""
    named = {k.arg: k.value for k in call.keywords}
    return [*call.args, *(named[name] for name in ("text", "text_pair")[len(call.args) :] if name in named)]


def _has(call: ast.Call, keyword: str) -> bool:
    return any(k.arg == keyword for k in call.keywords)
