"""The names of tasks stand in `automodel/tasks/` and nowhere else; a task is asked, not compared."""

from __future__ import annotations

import ast
import typing
from pathlib import Path

import pytest

import automodel
from automodel.data.keys import OF_ROWS
from automodel.tasks import registry
from automodel.tasks.registry import ROW_FORMATS, TASKS, TaskName, task_named, task_with

SOURCES = Path(automodel.__file__).parent
NAMES = {task.name for task in TASKS}
VALUES = {name for name, value in vars(registry).items() if value in TASKS}
"""`CAUSAL_LM` and the like."""


ENDS = ("startswith", "endswith", "removeprefix", "removesuffix")


def _is_part_of_a_name(text):
    """Long enough to be meant as a task: `classification`, but not `s`."""
    long = isinstance(text, str) and len(text) > len("token")
    return long and any(name.startswith(text) or name.endswith(text) for name in NAMES)


def faults_of(tree: ast.Module) -> list[tuple[int, str]]:
    """Lines that write a task's name, or compare a task with one of the tasks."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            found.append((node.lineno, f"the name {node.value!r}"))
        if isinstance(node, ast.Compare):
            parts = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
            compared = {part.id for part in parts if isinstance(part, ast.Name)} & VALUES
            found += [(node.lineno, f"a comparison with {name}") for name in sorted(compared)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ENDS:
            ends = [
                part.value for argument in node.args for part in ast.walk(argument) if isinstance(part, ast.Constant)
            ]
            found += [(node.lineno, f"{node.func.attr}({end!r})") for end in ends if _is_part_of_a_name(end)]
    return found


def test_no_other_file_compares_a_task():
    files = [path for path in sorted(SOURCES.rglob("*.py")) if path.parent != SOURCES / "tasks"]
    assert len(files) > 300
    assert [(str(p.relative_to(SOURCES)), *f) for p in files for f in faults_of(ast.parse(p.read_text()))] == []


@pytest.mark.parametrize(
    "line",
    [
        "if task == 'causal-lm': pass",
        "LEARNS = ('seq2seq', 'token-classification')",
        "if task is CAUSAL_LM: pass",
        "if task.name == CAUSAL_LM.name: pass",
        "if task in (SEQ2SEQ, CAUSAL_LM): pass",
        "if task.name.endswith('-classification'): pass",
    ],
)
def test_a_comparison_would_be_found(line):
    assert faults_of(ast.parse(line))


def test_every_task_is_registered_under_its_name():
    literal = typing.get_args(typing.get_args(TaskName)[0])
    assert literal == tuple(task.name for task in TASKS)
    assert [task_named(task.name) for task in TASKS] == list(TASKS)
    assert [str(task) for task in TASKS] == list(literal)
    assert [rows.task for rows in ROW_FORMATS] == list(literal)
    assert [task_with(task.head) for task in TASKS] == list(TASKS)


def test_every_files_task_is_registered():
    from automodel.tasks.task import Task

    for path in (SOURCES / "tasks").glob("*.py"):
        __import__(f"automodel.tasks.{path.stem}")
    assert {type(task) for task in TASKS} == {kind for kind in _kinds_of(Task) if hasattr(kind, "name")}


def _kinds_of(kind):
    return {kind}.union(*map(_kinds_of, kind.__subclasses__()))


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_what_a_task_says_of_itself_is_known_elsewhere(task):
    assert set(task.rows.keys) <= OF_ROWS
    assert set(task.rows.roles.values()) <= set(task.rows.keys)
    assert (task.head.wants == "pooled") == (task.rows.labels == "document")
    assert "prediction" in task.answer.__dataclass_fields__
