"""The tables on the terminal: the reference's "Expected Results", and the ladder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

Measured = dict[str, Any]


def comparison_table(opponents: Sequence[Measured], ours: Measured) -> Table:
    """One row a metric, one column a side, and the improvement over the first opponent."""
    baseline = opponents[0]
    table = Table(title="Performance comparison", title_justify="left")
    table.add_column("Metric", no_wrap=True)
    for side in (*opponents, ours):
        table.add_column(side["method"], justify="right")
    table.add_column(f"Improvement over {baseline['method']}" if len(opponents) > 1 else "Improvement", justify="right")
    for name, shown, improvement in metric_rows(ours):
        table.add_row(name, *(shown(side) for side in (*opponents, ours)), improvement(baseline, ours))
    return table


Show = Callable[[Measured], str]
Improve = Callable[[Measured, Measured], str]


def metric_rows(ours: Measured) -> list[tuple[str, Show, Improve]]:
    """The rows: name, how a side's value is shown, how the improvement is put."""
    memory = "GPU Memory (peak, in use)" if ours["memory_kind"] == "gpu" else "Host Memory (peak)"
    rows: list[tuple[str, Show, Improve]] = [
        ("Training Time", lambda s: f"{s['training_time']:.2f} s", lambda b, o: times(b, o, "training_time")),
        (memory, lambda s: f"{s['peak_memory_gib']:.2f} GiB", lambda b, o: reduction(b, o, "peak_memory_gib")),
        ("Steps/Second", lambda s: f"{s['steps_per_s']:.2f}", lambda b, o: gain(b, o, "steps_per_s")),
        ("Samples/Second", lambda s: f"{s['samples_per_s']:,.1f}", lambda b, o: gain(b, o, "samples_per_s")),
        ("Tokens/Second (real)", lambda s: f"{s['tokens_per_s']:,.0f}", lambda b, o: gain(b, o, "tokens_per_s")),
        ("Seconds/Epoch", lambda s: f"{s['seconds_per_epoch']:.2f}", lambda b, o: times(b, o, "seconds_per_epoch")),
        ("Step (median)", lambda s: f"{s['ms_per_step']:.2f} ms", lambda b, o: times(b, o, "ms_per_step")),
        ("Step (p20 – p80)", lambda s: f"{s['ms_p20']:.2f} – {s['ms_p80']:.2f} ms", lambda b, o: ""),
        ("Process start → end", lambda s: f"{s['wall_s']:.1f} s", lambda b, o: times(b, o, "wall_s")),
        (
            "Process start → 1st step",
            lambda s: f"{s['first_step_s']:.1f} s",
            lambda b, o: times(b, o, "first_step_s"),
        ),
    ]
    if ours["memory_kind"] == "gpu":  # the pools of captured steps are held between them: what the card must have
        held = (lambda s: f"{s['peak_reserved_gib']:.2f} GiB"), (lambda b, o: reduction(b, o, "peak_reserved_gib"))
        rows.insert(2, ("GPU Memory (peak, held)", *held))
    if ours.get("gpu_utilization_percent") is not None:
        rows.insert(6, ("GPU Utilization", _utilization, lambda b, o: gain(b, o, "gpu_utilization_percent", "better")))
    else:  # less disturbed by other programs than the clock on the wall
        rows.append(("Processor Time", lambda s: f"{s['cpu_s']:.1f} s", lambda b, o: times(b, o, "cpu_s")))
    metric = leading_metric(ours)
    if metric is not None:
        rows.append((f"Validation {metric}", lambda s: _metric(s, metric), lambda b, o: ""))
    rows.append(("Set-up", lambda s: s["setup"], lambda b, o: ""))
    return rows


def leading_metric(side: Measured) -> str | None:
    found = side["validation"] or {}
    leading = ("entity_f1", "f1_micro", "accuracy", "pearson", "perplexity", "loss")
    return next((name for name in leading if name in found), None)


def _metric(side: Measured, name: str) -> str:
    value = (side["validation"] or {}).get(name)
    return "–" if value is None else f"{value:.4f}"


def _utilization(side: Measured) -> str:
    value = side.get("gpu_utilization_percent")
    return "–" if value is None else f"{value:.0f}%"


def times(baseline: Measured, ours: Measured, key: str) -> str:
    """Of durations: 2.50x faster, or 1.20x slower."""
    ratio = baseline[key] / ours[key]
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def gain(baseline: Measured, ours: Measured, key: str, word: str = "faster") -> str:
    """Of rates: 150% faster, or 20% slower."""
    if not baseline.get(key) or ours.get(key) is None:
        return ""
    share = ours[key] / baseline[key] - 1
    worse = {"faster": "slower", "better": "lower"}[word]
    return f"{share * 100:.0f}% {word}" if share >= 0 else f"{-share * 100:.0f}% {worse}"


def reduction(baseline: Measured, ours: Measured, key: str) -> str:
    """Of amounts: 24% reduction, or 10% more."""
    share = 1 - ours[key] / baseline[key] if baseline[key] else 0.0
    return f"{share * 100:.0f}% reduction" if share >= 0 else f"{-share * 100:.0f}% more"


def ladder_table(rungs: Sequence[Measured]) -> Table:
    """The performance guide's cumulative table: every line adds one thing to the line above it."""
    table = Table(title="One optimization at a time", title_justify="left")
    table.add_column("Configuration")
    for name in ("Time", "Step", "Tokens/s", "Peak memory", "Speedup"):
        table.add_column(name, justify="right")
    first = rungs[0]
    for rung in rungs:
        if rung["status"] == "failed":
            table.add_row(rung["rung"], "failed", "", "", "", "")
            continue
        table.add_row(
            rung["rung"],
            f"{rung['training_time']:.2f} s",
            f"{rung['ms_per_step']:.2f} ms",
            f"{rung['tokens_per_s']:,.0f}",
            f"{rung['peak_memory_gib']:.2f} GiB",
            f"{first['training_time'] / rung['training_time']:.1f}x" if first["status"] != "failed" else "",
        )
    return table
