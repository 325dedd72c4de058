"""Values of a script, read from its syntax tree: constants, names that hold constants, and a little arithmetic.

Nothing is executed. What cannot be known without running the script raises `Unknown`, with its line.
"""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from automodel.migrate.bindings import Bindings

OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.Mod: operator.mod,
}  # fmt: skip
FUNCTIONS: dict[str, Any] = {
    "len": len, "range": range, "enumerate": enumerate, "zip": zip, "dict": dict, "list": list, "tuple": tuple,
    "sorted": sorted, "str": str, "int": int,
}  # fmt: skip
VIEWS = ("items", "keys", "values")
DEEPEST = 50
LONGEST = 10_000
"""Of a list that is put together: `range(10**9)` is not."""


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
        if isinstance(node, ast.DictComp | ast.ListComp):
            return self._comprehension(node, line, depth)
        if isinstance(node, ast.Subscript):
            return self._made(
                node, lambda: self.value(node.value, line, depth + 1)[self.value(node.slice, line, depth)]
            )
        if isinstance(node, ast.Call) and self._is_plain(node, line):
            return self._call(node, line, depth)
        return self._known_words(node)

    def _made(self, node: ast.expr, make: Callable[[], Any]) -> Any:
        """What Python's own functions make of constants, as a list where it is a row of things."""
        try:
            found = make()
            if isinstance(found, str | int | float | dict) or found is None:
                return found
            items = list(islice(found, LONGEST + 1))
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise Unknown(node.lineno, f"`{ast.unparse(node)[:60]}`: {error}") from error
        if len(items) > LONGEST:
            raise Unknown(node.lineno, f"`{ast.unparse(node)[:60]}` is too long")
        return items

    def _is_plain(self, node: ast.Call, line: int) -> bool:
        """Whether a call is one of Python's own functions, or `.items()`, without options."""
        if node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
            return False
        if isinstance(node.func, ast.Attribute):
            return node.func.attr in VIEWS and not node.args
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        return name in FUNCTIONS and self.bindings.find(name, line) is None

    def _call(self, node: ast.Call, line: int, depth: int) -> Any:
        if isinstance(node.func, ast.Attribute):
            method, owner = node.func.attr, self.value(node.func.value, line, depth + 1)
            return self._made(node, lambda: getattr(dict(owner), method)())
        name = name_of(node)
        read = self.value if name in ("len", "sorted") else self._ordered
        given = [read(arg, line, depth + 1) for arg in node.args]
        return self._made(node, lambda: FUNCTIONS[name](*given))

    def _ordered(self, node: ast.expr, line: int, depth: int) -> Any:
        """A value whose order is looked at: that of a set changes from run to run."""
        found, where = node, line
        for _ in range(DEEPEST):
            before = self.before(found.id, where) if isinstance(found, ast.Name) else None
            if before is None:
                break
            where, found = before
        if isinstance(found, ast.Set):
            raise Unknown(node.lineno, f"`{ast.unparse(node)[:60]}`: a set has no order")
        return self.value(node, line, depth)

    def _comprehension(self, node: ast.DictComp | ast.ListComp, line: int, depth: int) -> Any:
        each = node.generators[0]
        if len(node.generators) > 1 or each.ifs or each.is_async:
            raise Unknown(node.lineno, f"`{ast.unparse(node)[:60]}` is only known when the script runs")
        rows = self._ordered(each.iter, line, depth + 1)
        items = self._made(each.iter, lambda: iter(rows))
        filled = [_Filled(_matched(each.target, item)) for item in items]
        if isinstance(node, ast.ListComp):
            return [self.value(names.visit(copy.deepcopy(node.elt)), line, depth + 1) for names in filled]
        parts = [[names.visit(copy.deepcopy(part)) for part in (node.key, node.value)] for names in filled]
        pairs = [[self.value(part, line, depth + 1) for part in pair] for pair in parts]
        return self._made(node, lambda: dict(pairs))

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


class _Filled(ast.NodeTransformer):
    """An expression with a comprehension's names replaced by what they hold."""

    def __init__(self, names: dict[str, Any]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(self.names[node.id]), node) if node.id in self.names else node


def _matched(target: ast.expr, item: Any) -> dict[str, Any]:
    """`i, name` and `(0, "neg")`: which name holds what."""
    if isinstance(target, ast.Name):
        return {target.id: item}
    if isinstance(target, ast.Tuple) and isinstance(item, list | tuple) and len(item) == len(target.elts):
        return {name: held for part, inner in zip(target.elts, item) for name, held in _matched(part, inner).items()}
    raise Unknown(target.lineno, f"`{ast.unparse(target)}` is only known when the script runs")
