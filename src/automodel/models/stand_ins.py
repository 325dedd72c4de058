"""Stand-ins for names of modules that are not imported, and the import hook that hands them out.

`StandIn` is an object that becomes the real one when it is used; `StandInImports` takes the place of
`builtins.__import__` and answers `from sklearn.metrics import roc_curve` with one, where a table says so. What goes
into the table, and why, is `lean_imports.py`.

A stand-in is exact because a module that is not imported has no instances and no effects: asking whether an object is
an instance of a class of it is answered without it, and everything else (a call, an attribute, deriving a class)
imports it and is passed on. Once the module has been imported, by whomever, the stand-ins are replaced by the real
objects in every namespace that got one; `torch.compile`, which reads code rather than running it, then never meets one.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable, Container, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec, resolve_name
from typing import Any

Answer = Callable[..., Any]
"""What a function returns in a case that takes no import; `NotImplemented` in every other."""


class StandIn(type):
    """A name of a module that is not imported. A class, so that it can stand in annotations and `isinstance`."""

    def __new__(mcs, name: str, bases: tuple[type, ...] = (), body: dict[str, Any] | None = None, **keywords: Any):
        if bases:  # someone derives from a stand-in: derive from the real class
            real = tuple(real_object(base) if isinstance(base, StandIn) else base for base in bases)
            return types.new_class(name, real, keywords, lambda namespace: namespace.update(body or {}))
        answer: Answer | None = keywords.get("answer")
        own = {"__module__": keywords["module"], "__slots__": (), "_answer": staticmethod(answer or _no_answer)}
        return super().__new__(mcs, name, (), own)

    def __init__(cls, name: str, bases: tuple[type, ...] = (), body: Any = None, **keywords: Any):
        super().__init__(name, bases, body or {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        answer = cls._answer(*args, **kwargs)
        return real_object(cls)(*args, **kwargs) if answer is NotImplemented else answer

    def __instancecheck__(cls, instance: Any) -> bool:
        return is_imported(cls.__module__) and isinstance(instance, real_object(cls))

    def __subclasscheck__(cls, subclass: type) -> bool:
        if subclass is cls:
            return True
        return is_imported(cls.__module__) and issubclass(subclass, real_object(cls))

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # asked by `typing`, `inspect` and the like of everything they meet
            raise AttributeError(name)
        return getattr(real_object(cls), name)

    def __setattr__(cls, name: str, value: Any) -> None:
        setattr(real_object(cls), name, value)

    def __repr__(cls) -> str:
        return f"<stand-in for {cls.__module__}.{cls.__name__}>"


def _no_answer(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def real_object(stand_in: Any) -> Any:
    """What a stand-in stands for; imports its module."""
    return getattr(import_module(stand_in.__module__), stand_in.__name__)


def is_imported(name: str) -> bool:
    """Imported to its end: a module is listed before its file has been run."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


@dataclass(frozen=True)
class Rules:
    """Who gets stand-ins for what."""

    names: Mapping[str, Container[str]]
    """By module: the names that may be stood in for."""
    answers: Mapping[str, Answer]
    """By name."""
    packages: tuple[str, ...]
    """Beginnings of the names of files that get stand-ins, each with its dot."""
    files: Container[str]
    """Names of further files that do."""
    ask_the_compiler: Container[str]
    """Files that import `torch._dynamo` for what `Compiler` answers."""


class StandInImports:
    """`builtins.__import__` with stand-ins."""

    def __init__(self, rules: Rules, watch: Callable[[str, Any], None]):
        self.plain: Callable[..., Any] = builtins.__import__
        self.compiler = Compiler()
        self._rules = rules
        self._watch = watch
        """Told the importing file and the module whenever something is imported plainly."""
        self._torch = _TorchWithoutCompiler(self.compiler)
        self._sympy = types.SimpleNamespace(Basic=StandIn("Basic", module="sympy"))
        self._made: dict[str, dict[str, Any]] = {"torch._dynamo": {}}
        """Stand-ins by module and name."""
        self._holders: dict[str, dict[int, dict[str, Any]]] = {}
        """For each module, the namespaces that hold stand-ins for its names."""
        self._looked_at, self._arriving = 0, False

    def install(self) -> None:
        builtins.__import__ = self  # ty: ignore[invalid-assignment]

    def withdraw(self) -> None:
        """Back to plain imports. Stand-ins that were handed out go on working."""
        if builtins.__import__ is self:
            builtins.__import__ = self.plain

    def __call__(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # named as in builtins.__import__: some callers use keywords
        locals: Mapping[str, Any] | None = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        importer = (globals or {}).get("__name__") or ""
        if fromlist:
            if importer.startswith(self._rules.packages) or importer in self._rules.files:
                module = name if level == 0 else resolve_name("." * level + name, (globals or {}).get("__package__"))
                if self._may_stand_in(module, fromlist):
                    return self._stand_ins(module, fromlist, globals)
        elif name == "torch._dynamo" and importer in self._rules.ask_the_compiler and name not in sys.modules:
            return self._torch
        elif name == "sympy" and importer == "torch._prims_common" and name not in sys.modules:
            return self._sympy  # asked whether a number is a formula
        imported = self.plain(name, globals, locals, fromlist, level)
        self._watch(importer, imported)
        if self._arriving or len(sys.modules) != self._looked_at:
            self._replace_what_arrived()
        return imported

    def _may_stand_in(self, module: str, names: Any) -> bool:
        allowed = self._rules.names.get(module)
        if allowed is None or module in sys.modules or not all(name in allowed for name in names):
            return False
        # Not installed: the plain import says so, in the words its importer waits for.
        root = module.partition(".")[0]
        return root in sys.modules or find_spec(root) is not None

    def _stand_ins(self, module: str, names: Any, namespace: Any) -> Any:
        made = self._made.setdefault(module, {})
        if isinstance(namespace, dict):
            self._holders.setdefault(module, {})[id(namespace)] = namespace
        for name in names:
            if name not in made:
                made[name] = StandIn(name, module=module, answer=self._rules.answers.get(name))
        return types.SimpleNamespace(**{name: made[name] for name in names})

    def _replace_what_arrived(self) -> None:
        here = [name for name in self._made if name in sys.modules]
        self._looked_at = len(sys.modules)
        self._arriving = not all(is_imported(name) for name in here)  # its file is still being run: look again
        for name in [name for name in here if is_imported(name)]:
            stand_ins = {id(stand_in): stand_in for stand_in in self._made.pop(name).values()}
            for namespace in self._holders.pop(name, {}).values():
                for key, value in list(namespace.items()):
                    if id(value) in stand_ins:
                        namespace[key] = real_object(stand_ins[id(value)])
            if name == "torch._dynamo":
                self.compiler.settle(sys.modules[name])


class Compiler:
    """Stands for `torch._dynamo` where it is only asked to leave a function alone, or to mark one: in transformers'
    decorators, in torch's optimizers and its random numbers without memory. Without the compiler there is nothing to
    leave alone; once it comes, it is told (`settle`)."""

    KEPT_ANSWER = "__dynamo_disable"
    """Where `torch._disable_dynamo` keeps what `disable` gave it."""

    def __init__(self) -> None:
        self._allowed: list[Any] = []
        self._left_alone: list[Any] = []

    @contextmanager
    def as_attribute_of_torch(self) -> Generator[None]:
        """For decorators that are written `@torch._dynamo.…`."""
        if "torch._dynamo" not in sys.modules:
            sys.modules["torch"].__dict__["_dynamo"] = self
        try:
            yield
        finally:
            self._step_aside()

    def _step_aside(self) -> None:
        if sys.modules["torch"].__dict__.get("_dynamo") is self:
            del sys.modules["torch"].__dict__["_dynamo"]

    def settle(self, real: Any) -> None:
        """The compiler is here: what was asked of its stand-in is now asked of it."""
        for function in self._left_alone:
            function.__dict__.pop(self.KEPT_ANSWER, None)  # so it is asked again, and wraps the function
        for function in self._allowed:
            real.allow_in_graph(function)
        self._left_alone, self._allowed = [], []

    def disable(self, fn: Any = None, recursive: bool = True, *, reason: Any = None, wrapping: bool = True) -> Any:
        if wrapping:
            return sys.modules["torch"]._disable_dynamo(fn, recursive)  # torch's own way to ask at the first call
        self._left_alone.append(fn)  # that first call
        return fn

    def allow_in_graph(self, fn: Any) -> Any:
        self._allowed.append(fn)
        return fn

    def assume_constant_result(self, fn: Any) -> Any:
        fn._dynamo_marked_constant = True
        return fn

    def graph_break(self, msg: str = "") -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._step_aside()
        return getattr(import_module("torch._dynamo"), name)


class _TorchWithoutCompiler:
    """torch as `import torch._dynamo` binds it, with the stand-in."""

    def __init__(self, compiler: Compiler):
        self._dynamo = compiler

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["torch"], name)
