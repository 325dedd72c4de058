"""The plan as text, in two parts: what was asked for (data, batch, steps, memory, time), and how it is done.

A table each on a terminal, the second one dimmed; aligned lines elsewhere. The same lines go into the report.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from automodel.plan.plan import Decision, Plan

TITLES = ("Plan", "How it is done")
WIDE = 100  # columns of a terminal with room for reasons of their own


def print_plan(plan: Plan, console: Console | None = None) -> None:
    console = console or Console()
    for title, lines, dimmed in zip(TITLES, plan.parts, (False, True)):
        if not lines:
            continue
        width = max(len(d.name) for d in lines)
        if console.is_terminal:
            _print_table(title, lines, dimmed, width, console)
            continue
        console.print(f"{title}:")
        for d in lines:
            console.print(
                f"{d.name.ljust(width)}  {d.value}  ({d.reason})", markup=False, highlight=False, soft_wrap=True
            )


def _print_table(title: str, lines: Sequence[Decision], dimmed: bool, width: int, console: Console) -> None:
    """Name, decision and reason: in three columns where there is room, otherwise the reason behind the decision."""
    style, wide = "dim" if dimmed else "", console.width >= WIDE
    table = Table(
        title=title, title_justify="left", title_style=style or "bold", box=None, pad_edge=False, show_header=False
    )
    table.add_column(style=style or "cyan", min_width=width, no_wrap=True)
    table.add_column(style=style, overflow="fold", max_width=console.width // 3 if wide else None)
    table.add_column(overflow="fold")
    for d in lines:
        # Brackets in names are brackets, not styles.
        name, value, reason = Text(d.name), Text(str(d.value), style=style or "bold"), Text(d.reason, style="dim")
        if wide:
            table.add_row(name, value, reason)
        else:
            table.add_row(name, Text("  ").join([value, reason]))
    console.print(table)
