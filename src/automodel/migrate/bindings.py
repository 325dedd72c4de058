"""What a name of a script holds at a line, as far as that is certain.

A value is certain if the last assignment above the line happens whenever the line is reached: in the same function and
in no branch, loop or `try` that the line is not in. A name that a function gets as an argument, that a loop sets, that
`+=` or `.update()` changes, or that a branch may have set, is only known when the script runs.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

MUTATORS = (
    "append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update",
)  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef
Branches = tuple[tuple[int, int], ...]
"""The arms of branches around a statement, outermost first: which statement, and which of its arms."""


@dataclass(frozen=True)
class Binding:
    """A name is given something."""

    line: int
    value: ast.expr | None
    """None: only a run knows."""
    branches: Branches
    why: str = ""


@dataclass
class Scope:
    """A module, a function or a class, with the names that are given something in it."""

    line: int = 0
    parent: Scope | None = None
    names: dict[str, list[Binding]] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    """Names that are `global` in it."""


class Bindings:
    """All bindings of a script."""

    def __init__(self, tree: ast.Module):
        self.module = Scope()
        self.places: dict[int, tuple[Scope, Branches]] = {}
        self.looped: set[int] = set()
        """Lines inside loops."""
        self._visit(tree.body, self.module, (), looped=False)

    def find(self, name: str, line: int) -> Binding | None:
        """What a name holds at a line; one without a value says why it is not known. None: it is given nothing."""
        scope, branches = self.places.get(line, (self.module, ()))
        own, inner = scope, None
        while scope is not None:
            found = scope.names.get(name)
            if found and scope is own:
                above = [b for b in found if b.line < line]
                if above:
                    return self._certain(above, branches, name)
            elif found and inner is not None:
                last = sorted(found, key=lambda b: b.line)
                if len(last) > 1 and inner.line < last[-1].line:
                    return Binding(last[-1].line, None, (), f"`{name}` has several values, and which one is not clear")
                return self._certain(last, (), name)
            inner, scope = scope, scope.parent
        return None

    def _certain(self, above: list[Binding], branches: Branches, name: str) -> Binding:
        last = max(above, key=lambda b: b.line)
        if branches[: len(last.branches)] != last.branches:
            return Binding(last.line, None, (), f"`{name}` is set in a branch or loop (line {last.line})")
        return last

    def _bind(self, scope: Scope, name: str, binding: Binding) -> None:
        if name in scope.shared:
            here = (id(scope), 0)  # whenever the function runs
            binding = Binding(binding.line, binding.value, (here, *binding.branches), binding.why)
            scope = self.module
        scope.names.setdefault(name, []).append(binding)

    def _visit(self, body: list[ast.stmt], scope: Scope, branches: Branches, looped: bool) -> None:
        for statement in body:
            for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
                self.places[line] = scope, branches
                if looped:
                    self.looped.add(line)
            self._statement(statement, scope, branches, looped)

    def _statement(self, node: ast.stmt, scope: Scope, branches: Branches, looped: bool) -> None:
        if isinstance(node, Function | ast.ClassDef):
            self._bind(scope, node.name, Binding(node.lineno, None, branches, f"`{node.name}` is code of the script"))
            inner = Scope(node.lineno, scope)
            for argument in _arguments(node) if isinstance(node, Function) else ():
                why = f"`{argument}` is an argument of {node.name}()"
                inner.names[argument] = [Binding(node.lineno, None, (), why)]
            self._visit(node.body, inner, (), looped=False)
            return
        self._expressions(node, scope, branches)
        for arm, body in enumerate(_arms(node)):
            inside = branches if _always(node) else (*branches, (id(node), arm))
            self._visit(body, scope, inside, looped or isinstance(node, ast.For | ast.AsyncFor | ast.While))

    def _expressions(self, node: ast.stmt, scope: Scope, branches: Branches) -> None:
        """Names that a statement itself gives something."""
        line = node.lineno
        if isinstance(node, ast.Global):
            scope.shared.update(node.names)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, line, scope, branches)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value, line, scope, branches)
        elif isinstance(node, ast.AugAssign):
            self._unknown(node.target, line, scope, branches, "is changed by an assignment like +=")
        elif isinstance(node, ast.For | ast.AsyncFor):
            self._unknown(node.target, line, scope, branches, "is set by a loop")
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                if item.optional_vars is not None:
                    self._unknown(item.optional_vars, line, scope, branches, "is set by `with`")
        for part in _own_parts(node):
            if isinstance(part, ast.NamedExpr):
                self._unknown(part.target, line, scope, branches, "is set inside an expression")
            elif (
                isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in MUTATORS
                and isinstance(part.func.value, ast.Name)
            ):  # fmt: skip
                self._unknown(part.func.value, line, scope, branches, f"is changed by .{part.func.attr}()")

    def _assign(self, target: ast.expr, value: ast.expr, line: int, scope: Scope, branches: Branches) -> None:
        if isinstance(target, ast.Name):
            self._bind(scope, target.id, Binding(line, value, branches))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for part, inner in zip(target.elts, value.elts):
                self._assign(part, inner, line, scope, branches)
        elif isinstance(target, ast.Subscript):
            self._unknown(target.value, line, scope, branches, "is changed item by item")
        else:
            self._unknown(target, line, scope, branches, "is one of several values")

    def _unknown(self, target: ast.expr, line: int, scope: Scope, branches: Branches, why: str) -> None:
        if isinstance(target, ast.Name):
            self._bind(scope, target.id, Binding(line, None, branches, f"`{target.id}` {why} (line {line})"))
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._unknown(part, line, scope, branches, why)
        elif isinstance(target, ast.Starred | ast.Subscript):
            self._unknown(target.value, line, scope, branches, why)


def _arguments(node: Function) -> list[str]:
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *(a for a in (given.vararg, given.kwarg) if a)]
    return [argument.arg for argument in every]


def _arms(node: ast.stmt) -> list[list[ast.stmt]]:
    """Bodies of a statement, each of which may or may not happen."""
    arms = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    arms += [handler.body for handler in getattr(node, "handlers", [])]
    return [*arms, *(case.body for case in getattr(node, "cases", []))]


def _always(node: ast.stmt) -> bool:
    """`with`, and the branch in which a script is run."""
    if isinstance(node, ast.With | ast.AsyncWith):
        return True
    return isinstance(node, ast.If) and not node.orelse and "__name__" in ast.unparse(node.test)


def _own_parts(node: ast.stmt) -> list[ast.AST]:
    """Expressions of a statement, without those of statements inside it."""
    parts: list[ast.AST] = []
    waiting: list[ast.AST] = [
        child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr | ast.withitem)
    ]
    while waiting:
        part = waiting.pop()
        parts.append(part)
        waiting += list(ast.iter_child_nodes(part))
    return parts
