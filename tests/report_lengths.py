"""Lists the longest files and functions of `src/`: a question to their authors, not a limit (`make lengths`)."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
FILE_LINES, FUNCTION_LINES = 500, 80


def long_files_and_functions() -> list[tuple[int, str]]:
    """Every file and function past those lengths, longest first; Triton kernels are one program each and left out."""
    found = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(SOURCE))
        if text.count("\n") > FILE_LINES:
            found.append((text.count("\n"), name))
        if path.stem.endswith("_triton"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    found.append((lines, f"{name}: {node.name}"))
    return sorted(found, reverse=True)


if __name__ == "__main__":
    for lines, place in long_files_and_functions():
        print(f"{lines:5}  {place}")
