"""Values of a script, read from its syntax tree: constants, names that hold constants, and a little arithmetic.

Nothing is executed. What cannot be known without running the script raises `Unknown`, with its line.
"""

from __future__ import annotations

import ast
import operator
from dataclasses import dataclass, field
from typing import Any

from automodel.migrate.bindings import Bindings

OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.Mod: operator.mod,
}  # fmt: skip
DEEPEST = 50


class Unknown(Exception):
    """A value that only the running script knows."""

    def __init__(self, line: int, text: str):
        super().__init__(text)
        self.line, self.text = line, text


def name_of(node: ast.AST | None) -> str:
    """The last part of what is called or named: `AutoTokenizer.from_pretrained` → `from_pretrained`."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted(node: ast.AST | None) -> str:
    """`torch.cuda.is_available`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


@dataclass
class Script:
    """A parsed script, with everything that is assigned to a name."""

    tree: ast.Module
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    assumed: set[tuple[int, str]] = field(default_factory=set)
    """What was taken for granted, with its line."""

    def __post_init__(self) -> None:
        self.bindings = Bindings(self.tree)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node

    def calls(self, *names: str) -> list[ast.Call]:
        """Every call of one of these, in the order of the file."""
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and name_of(n) in names]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def before(self, name: str, line: int) -> tuple[int, ast.expr] | None:
        """What a name holds at a line, and the line where it got it; None where only a run knows."""
        found = self.bindings.find(name, line)
        return None if found is None or found.value is None else (found.line, found.value)

    def why_unknown(self, name: str, line: int) -> str:
        found = self.bindings.find(name, line)
        return found.why if found is not None and found.why else f"`{name}` is only known when the script runs"

    def value(self, node: ast.expr, line: int | None = None, depth: int = 0) -> Any:
        """The value of an expression; raises `Unknown`."""
        line = node.lineno if line is None else line
        if depth > DEEPEST:
            raise Unknown(line, "too deep")
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            found = self.before(node.id, line)
            if found is None:
                raise Unknown(node.lineno, self.why_unknown(node.id, line))
            return self.value(found[1], found[0], depth + 1)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(item, line, depth + 1) for item in node.elts]
        if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
            keys = [self.value(key, line, depth + 1) for key in node.keys if key is not None]
            return dict(zip(keys, (self.value(item, line, depth + 1) for item in node.values)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            inner = self.value(node.operand, line, depth + 1)
            return -inner if isinstance(node.op, ast.USub) else not inner
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            both = (self.value(side, line, depth + 1) for side in (node.left, node.right))
            try:
                return OPERATORS[type(node.op)](*both)
            except (TypeError, ValueError, ArithmeticError) as error:
                raise Unknown(node.lineno, str(error)) from error
        if isinstance(node, ast.JoinedStr):
            return "".join(self._text(part, line, depth) for part in node.values)
        return self._known_words(node)

    def _text(self, part: ast.expr, line: int, depth: int) -> str:
        if isinstance(part, ast.FormattedValue):
            if part.format_spec is not None:
                raise Unknown(part.lineno, "a formatted text")
            return str(self.value(part.value, line, depth + 1))
        return str(self.value(part, line, depth + 1))

    def _class_value(self, kind: ast.ClassDef, node: ast.Attribute) -> Any:
        """`CFG.lr`, where that stands in the class and nobody sets it again."""
        values = {
            target.id: part.value
            for part in kind.body
            if isinstance(part, ast.Assign)
            for target in part.targets
            if isinstance(target, ast.Name)
        }
        again = [
            other
            for other in ast.walk(self.tree)
            if isinstance(other, ast.Attribute) and other.attr == node.attr and isinstance(other.ctx, ast.Store)
        ]
        names = [target.id for part in kind.body if isinstance(part, ast.Assign) for target in part.targets
                 if isinstance(target, ast.Name)]  # fmt: skip
        if again or kind.decorator_list or kind.bases or names.count(node.attr) != 1:
            raise Unknown(node.lineno, f"`{ast.unparse(node)}` is only known when the script runs")
        return self.value(values[node.attr])

    def _known_words(self, node: ast.expr) -> Any:
        """Words of torch that stand for themselves."""
        words = dotted(node)
        if words.startswith("torch.") and words.count(".") == 1:
            return words
        if isinstance(node, ast.Attribute) and dotted(node.value).split(".")[-1] in ("IntervalStrategy", "TaskType"):
            return node.attr.lower()
        if isinstance(node, ast.Call) and dotted(node.func) in (
            "torch.cuda.is_available",
            "torch.cuda.is_bf16_supported",
        ):
            self.assumed.add((node.lineno, f"{dotted(node.func)}()"))
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self.classes:
            return self._class_value(self.classes[node.value.id], node)
        raise Unknown(node.lineno, f"`{ast.unparse(node)}` is only known when the script runs")
