"""The sections of the report, each a function from the run's files to HTML.

A section whose file is missing or unreadable says so; it never fails, since the report is written when a run ends, and
above all when it ends badly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from automodel.metrics.progress import format_value, title
from automodel.metrics.report_charts import Series, absent, balance, heat_map, histogram, line_chart
from automodel.metrics.report_files import RunFiles

MOST_CLASSES_IN_HEAT_MAP = 30
_COLUMNS = {"truncated": "Cut", "longest": "Longest before it was cut"}  # of the table of rows
_NOT_METRICS = ("step", "epoch", "split", "time", "loss")


def loss_section(run: RunFiles) -> str:
    """Training and validation loss in one chart."""
    if not run.metrics:
        return absent(run.missing("metrics.jsonl"))
    train, validation = run.points("train", "loss"), run.points("validation", "loss")
    broken = [step for step, value in train if not math.isfinite(value)]
    note, lost = "", None
    if broken:
        lost = broken[0]
        times = "one logged step" if len(broken) == 1 else f"{len(broken):,} logged steps"
        note = f"The training loss was not a number at {times}, first at step {broken[0]:,.0f}."
    series = [
        Series("training", train, "train", smooth=True),
        Series("validation", validation, "validation", dots=True),
    ]
    return line_chart(
        "Loss by step", series, last_step=run.last_step, log_toggle=True, tall=True, lost_from=lost, note=note
    )


def validation_section(run: RunFiles) -> str:
    """Every validation metric over the run, and all evaluations as a table."""
    lines = run.lines("validation")
    if not lines:
        return absent("No evaluation was made: the run has no validation data, or ended before the first evaluation.")
    names = [n for n in dict.fromkeys(n for line in lines for n in line) if n not in _NOT_METRICS]
    charts = ""
    if len(lines) > 1 and names:
        figures = [
            line_chart(
                title(n),
                [Series(title(n), run.points("validation", n), "validation", dots=len(lines) <= 40)],
                last_step=run.last_step,
            )
            for n in names
        ]
        charts = f'<div class="{"grid-3" if len(names) > 2 else "grid-2"}">{"".join(figures)}</div>'
    table = _evaluations(lines, ["loss", *names], run.best_step)
    if charts:
        return charts + f"<details><summary>All {len(lines)} evaluations</summary>{table}</details>"
    return table


def _evaluations(lines: Sequence[dict[str, Any]], names: Sequence[str], best_step: int | None) -> str:
    head = "".join(f'<th class="num">{escape(title(n))}</th>' for n in names)
    rows = []
    for line in lines:
        cells = "".join(f'<td class="num">{_number(line.get(n))}</td>' for n in names)
        best = ' class="best"' if line["step"] == best_step else ""
        rows.append(f'<tr{best}><td class="num">{line["step"]:,}</td>{cells}</tr>')
    return (
        f'<div class="panel scroll"><table class="rows"><thead><tr><th class="num">Step</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def training_section(run: RunFiles) -> str:
    """Learning rate, gradient norm, throughput and memory, whichever were logged."""
    if not run.lines("train"):
        return absent(run.missing("metrics.jsonl"))
    speed = "tokens_per_s" if run.points("train", "tokens_per_s") else "samples_per_s"
    wanted = (
        ("lr", "Learning rate", False),
        ("grad_norm", "Gradient norm", True),
        (speed, "Tokens per second" if speed == "tokens_per_s" else "Examples per second", True),
        ("memory_gib", "Memory, GiB", False),
    )
    figures = []
    for name, caption, smooth in wanted:
        points = run.points("train", name)
        if points:
            series = Series(caption, points, "train", smooth=smooth)
            level = name == "memory_gib"  # it hardly ever moves, and its last digits would fill the whole chart
            figures.append(line_chart(caption, [series], last_step=run.last_step, from_zero=level))
    if not figures:
        return absent("Neither learning rate nor speed was logged.")
    if len(figures) % 2:
        figures[-1] = figures[-1].replace('class="chart"', 'class="chart wide"', 1)
    return f'<div class="grid-2">{"".join(figures)}</div>'


def data_section(run: RunFiles) -> str:
    """Lengths, labels and counts of the data."""
    if run.data is None:
        return absent(run.missing("data.json"))
    splits = [(name, run.data[name]) for name in ("train", "validation") if isinstance(run.data.get(name), dict)]
    if not splits:
        return absent("data.json describes no split.")
    figures = []
    for name, stats in splits:
        lengths = stats.get("length_histogram") or {}
        if lengths.get("counts"):
            figures.append(histogram(f"Lengths, {name}", lengths["edges"], lengths["counts"], "tokens"))
    several = (run.summary or {}).get("problem_type") == "multi_label_classification"
    for name, stats in splits:
        if stats.get("label_counts"):
            names = stats.get("label_names") or [str(i) for i in range(len(stats["label_counts"]))]
            total = stats.get("used") if several else None  # how many of the examples have it
            figures.append(balance(f"Labels, {name}", names, stats["label_counts"], total))
    if len(figures) % 2 and figures:
        figures[-1] = figures[-1].replace('class="chart"', 'class="chart wide"', 1)
    return f'<div class="grid-2">{"".join(figures)}</div>{_cuts(splits)}{_data_table(splits)}'


def _cuts(splits: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """A sentence for each limit that has cut something: the histograms show lengths after it."""
    told = []
    limits = (
        ("samples", "truncated", "max_length", "longest"),
        ("targets", "truncated_targets", "max_target_length", "longest_target"),
    )
    for name, stats in splits:
        for what, count, limit, longest in limits:
            if stats.get(count):
                share = stats[count] / max(1, stats.get("used") or 0)
                cut = f"{_count(stats[count])} of {_count(stats.get('used'))} {what} ({share:.1%}) were cut at {limit}"
                told.append(
                    f"{name}: {cut} {_count(stats.get(limit))}; the longest has {_count(stats.get(longest))} tokens."
                )
    return "".join(f'<p class="note">{escape(line)}</p>' for line in told)


def _data_table(splits: Sequence[tuple[str, dict[str, Any]]]) -> str:
    columns = ("rows", "used", "skipped", "truncated", "longest", "tokens", "max_length")
    head = "".join(f'<th class="num">{escape(_COLUMNS.get(c, title(c)))}</th>' for c in columns)
    rows = "".join(
        f"<tr><th>{name}</th>" + "".join(f'<td class="num">{_count(stats.get(c))}</td>' for c in columns) + "</tr>"
        for name, stats in splits
    )
    table = (
        f'<h3>Rows</h3><div class="panel scroll"><table class="rows"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    for name, stats in splits:
        skipped = stats.get("skipped_rows") or []
        if skipped:
            lines = "".join(
                f'<tr><td class="num">{_count(s.get("row"))}</td><td>{escape(str(s.get("reason", "")))}</td></tr>'
                for s in skipped
            )
            table += (
                f"<details><summary>Skipped rows of {name} (the first {len(skipped)} of "
                f'{_count(stats.get("skipped"))})</summary><div class="panel"><table class="rows">'
                f"<thead><tr><th class='num'>Row</th><th>Reason</th></tr></thead><tbody>{lines}</tbody></table>"
                "</div></details>"
            )
    return table


def confusion_section(run: RunFiles) -> str:
    """The confusion matrix, or the commonest confusions where there are many classes; empty where there is none."""
    matrix = (run.summary or {}).get("confusion_matrix")
    if not matrix:
        return ""
    names = [str(n) for n in (run.summary or {}).get("label_names") or range(len(matrix))]
    if len(names) != len(matrix):
        names = [str(i) for i in range(len(matrix))]
    if len(matrix) > MOST_CLASSES_IN_HEAT_MAP:
        return _commonest_confusions(matrix, names)
    heat = heat_map(matrix, names)
    if len(matrix) > 8:
        heat = heat.replace('class="heat"', 'class="heat many"', 1)
    return f'<div class="pair"><div class="panel">{heat}</div>{_class_table(matrix, names)}</div>'


def _commonest_confusions(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    pairs = [(count, i, j) for i, row in enumerate(matrix) for j, count in enumerate(row) if i != j and count]
    rows = "".join(
        f"<tr><td>{escape(names[i])}</td><td>{escape(names[j])}</td>"
        f'<td class="num">{count:,}</td><td class="num">{count / sum(matrix[i]):.1%}</td></tr>'
        for count, i, j in sorted(pairs, key=lambda p: (-p[0], p[1], p[2]))[:20]
    )
    return (
        f'<p class="note">{len(matrix)} classes; the most frequent confusions:</p><div class="panel scroll">'
        '<table class="rows"><thead><tr><th>True</th><th>Predicted</th><th class="num">Count</th>'
        f'<th class="num">Of the true class</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _class_table(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    rows = []
    for i, name in enumerate(names):
        right, support, predicted = matrix[i][i], sum(matrix[i]), sum(row[i] for row in matrix)
        precision, recall = _share(right, predicted), _share(right, support)
        f1 = _share(2 * right, support + predicted)
        rows.append(
            f'<tr><td>{escape(name)}</td><td class="num">{support:,}</td>'
            + "".join(f'<td class="num">{_number(v)}</td>' for v in (precision, recall, f1))
            + "</tr>"
        )
    return (
        '<div class="panel scroll"><table class="rows"><thead><tr><th>Class</th>'
        '<th class="num">Examples</th><th class="num">Precision</th><th class="num">Recall</th>'
        f'<th class="num">F1</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def plan_section(run: RunFiles) -> str:
    """What was decided, and why."""
    if run.plan is None:
        return absent(run.missing("plan.json"))
    decisions = [d for d in run.plan.get("decisions") or [] if isinstance(d, dict)]
    if not decisions:
        return absent("plan.json holds no decisions.")
    how = [d for d in decisions if d.get("asked") is False]  # plans of earlier releases do not tell
    asked = _plan_table([d for d in decisions if d not in how])
    return asked + (f"<details><summary>How it is done</summary>{_plan_table(how)}</details>" if how else "")


def _plan_table(decisions: Sequence[dict[str, Any]]) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(d.get('name', '')))}</th><td class='value'>{escape(str(d.get('value', '')))}</td>"
        f"<td class='why'>{escape(str(d.get('reason', '')))}</td></tr>"
        for d in decisions
    )
    return (
        '<div class="panel"><table class="rows plan"><thead><tr><th>What</th><th>Decision</th><th>Why</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def environment_section(run: RunFiles) -> str:
    """Device, parameters and versions."""
    if run.summary is None:
        return absent(run.missing("summary.json"))
    facts: dict[str, Any] = {}
    for key in ("model", "dataset", "task", "device"):
        if run.summary.get(key):
            facts[key] = run.summary[key]
    if run.summary.get("parameters"):
        facts["parameters"] = f"{run.summary['parameters']:,}"
    facts |= run.summary.get("versions") or {}
    rows = "".join(
        f"<tr><th>{escape(str(k))}</th><td class='value'>{escape(str(v))}</td></tr>" for k, v in facts.items()
    )
    return f'<div class="panel"><table class="rows facts-table"><tbody>{rows}</tbody></table></div>'


def config_section(run: RunFiles) -> str:
    """The resolved config, as it was written."""
    if run.config is None:
        return absent(run.missing("config.yaml"))
    lines = []
    for line in run.config.rstrip().splitlines():
        key, colon, rest = line.partition(":")
        is_key = colon and not key.lstrip().startswith("#") and (not rest or rest.startswith(" "))
        lines.append(f"<b>{escape(key)}</b>:{escape(rest)}" if is_key else escape(line))
    body = "\n".join(lines)
    return f"<details><summary>config.yaml, {len(lines)} lines</summary><pre>{body}</pre></details>"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _number(value: Any) -> str:
    return format_value(float(value)) if isinstance(value, int | float) else "–"


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else "–"
