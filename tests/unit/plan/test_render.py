"""The plan on a terminal says what it says in a file."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from automodel.plan.plan import Decision
from automodel.plan.render import print_plan


@pytest.mark.parametrize("terminal", [True, False])
def test_brackets_are_brackets(terminal):
    """Folders and classes may be called so; rich would take them for styles, or end the run over `[/x]`."""
    plan: Any = SimpleNamespace(decisions=[Decision("model", "runs/[red]x", "2 classes: [b], [/x], train[:90%]")])
    said = io.StringIO()
    print_plan(plan, Console(file=said, force_terminal=terminal, width=200, no_color=True))
    assert "runs/[red]x" in said.getvalue()
    assert "2 classes: [b], [/x], train[:90%]" in said.getvalue()
