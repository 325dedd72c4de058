"""Files of at most 400 lines and functions of at most 60, as STYLE asks; a Triton kernel is one program and may be
longer."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def test_nothing_is_too_long_to_be_read():
    files, functions = [], []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 400:
            files.append(str(path))
        if not path.stem.endswith("_triton"):
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
            functions += [f"{path}: {n.name}" for n in nodes if (n.end_lineno or 0) - n.lineno >= 60]
    assert not files
    assert not functions
