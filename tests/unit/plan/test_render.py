"""The plan on a terminal says what it says in a file, in two parts."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from automodel.plan.plan import Decision, Plan
from automodel.plan.render import print_plan


def printed(*decisions: Decision, terminal: bool, width: int = 200, colours: bool = False) -> str:
    parts: Any = Plan.parts
    plan: Any = SimpleNamespace(decisions=decisions)
    plan.parts = parts.fget(plan)
    said = io.StringIO()
    options = {"color_system": "standard"} if colours else {"color_system": None}
    print_plan(plan, Console(file=said, force_terminal=terminal, width=width, **options))
    return said.getvalue()


@pytest.mark.parametrize("width", [200, 80])
@pytest.mark.parametrize("terminal", [True, False])
def test_brackets_are_brackets(terminal, width):
    """Folders and classes may be called so; rich would take them for styles, or end the run over `[/x]`."""
    line = Decision("model", "runs/[red]x", "2 classes: [b], [/x], train[:90%]")
    said = printed(line, terminal=terminal, width=width)
    assert "runs/[red]x" in said
    assert "2 classes: [b], [/x], train[:90%]" in said


LINES = (
    Decision("padding", "none", "packed"),
    Decision("steps", 24, "2 epochs of 12"),
    Decision("data", "96 examples", "1,188 tokens"),
    Decision("memory", "1 GiB of 24 GiB", "estimate"),
    Decision("workers", 0, "collation in the main process"),
    Decision("time", "about 12 min", "rough estimate"),
)


@pytest.mark.parametrize("width", [140, 80])
@pytest.mark.parametrize("terminal", [True, False])
def test_what_was_asked_for_comes_first_and_how_it_is_done_after_it(terminal, width):
    said = printed(*LINES, terminal=terminal, width=width)
    first, how = said.split("How it is done")
    assert first.startswith("Plan")
    assert [line.split()[0] for line in first.splitlines()[1:]] == ["data", "steps", "memory", "time"]
    assert [line.split()[0] for line in how.splitlines()[1:]] == ["padding", "workers"]
    if not terminal:
        assert "steps   24  (2 epochs of 12)\n" in first


def test_the_second_part_is_dimmed():
    first, how = printed(*LINES, terminal=True, colours=True).split("How it is done")
    rows = how.splitlines()[1:]
    assert len(rows) == 2
    assert all(row.startswith(("\x1b[2mpadding", "\x1b[2mworkers")) for row in rows)
    assert "\x1b[1m24" in first


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_the_terminal(width):
    long = Decision("precision", "bf16", "weights, gradients and activations " * 6)
    said = printed(*LINES, long, terminal=True, width=width)
    assert max(map(len, said.splitlines())) <= width
    assert said.count("activations") == 6
