"""The plan as text: a table on a terminal, aligned lines elsewhere. The same lines go into the report."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from automodel.plan.plan import Plan


def print_plan(plan: Plan, console: Console | None = None) -> None:
    console = console or Console()
    if not console.is_terminal:
        width = max(len(d.name) for d in plan.decisions)
        for d in plan.decisions:
            console.print(
                f"{d.name.ljust(width)}  {d.value}  ({d.reason})", markup=False, highlight=False, soft_wrap=True
            )
        return
    table = Table(title="Plan", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading, style in (("what", "cyan"), ("decision", "bold"), ("why", "dim")):
        table.add_column(heading, style=style, overflow="fold")
    for d in plan.decisions:
        table.add_row(*map(Text, (d.name, str(d.value), d.reason)))  # brackets in names are brackets, not styles
    console.print(table)
