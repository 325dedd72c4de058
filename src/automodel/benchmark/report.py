"""`report.html` of a comparison: one self-contained file.

It shares the look and the charts of a run's report (metrics room) and, like it, loads nothing from anywhere: a content
security policy forbids it and allows the page's one script by its hash. Everything that comes from outside is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from automodel.benchmark.compare import agreement_lines
from automodel.benchmark.sides import OURS
from automodel.benchmark.tables import metric_rows
from automodel.metrics import report as run_report
from automodel.metrics.report_charts import Series, line_chart

REPORT = "report.html"
# Ours first, then opponents in their order; light and dark pages.
COLOURS = (("#2f62c9", "#7ea6f7"), ("#c2611a", "#eda063"), ("#5b8c3a", "#9acb79"), ("#8a4fb0", "#c79be4"))
BARS = (
    ("Training time", "training_time", "s", "with evaluations, checkpoints and the saved model; shorter is better"),
    ("Process start to end", "wall_s", "s", "imports, loading, training, saving; shorter is better"),
    ("Median step", "ms_per_step", "ms", "after the warm-up; shorter is better"),
    ("Throughput", "tokens_per_s", "tokens/s", "real tokens, padding not counted; longer is better"),
)
VERSIONS = {"torch": "torch", "transformers": "transformers", "Python": "python_version"}


def write_comparison_report(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / REPORT
    temporary = folder / f"{REPORT}.tmp"
    temporary.write_text(render_comparison(document), encoding="utf-8")
    os.replace(temporary, path)
    return path


def render_comparison(document: dict[str, Any]) -> str:
    """The page as text, from what the results file holds."""
    assets = Path(run_report.__file__)
    style = assets.with_name("report.css").read_text(encoding="utf-8") + _side_colours()
    script = assets.with_name("report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    sides = list(document["sides"].values())
    ours = next(side for side in sides if side["provider"] == OURS)
    ordered = [ours, *(side for side in sides if side is not ours)]
    parts = {
        "Results": _results_table(ordered),
        "Loss": _curves("Training loss, step by step", "losses", ordered, log=True) + _agreement(document, ordered),
        "Step time": _curves("Milliseconds of each step", "step_ms", ordered, log=True),
        "Time and throughput": _bars(ordered),
        "Memory": _memory(ordered),
        "One optimization at a time": _ladder(document.get("ladder") or []),
        "What was run": _facts(document),
    }
    body = "".join(f"<section><h2>{name}</h2>{content}</section>" for name, content in parts.items() if content)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Performance comparison</title>\n<style>{style}</style></head>\n"
        f"<body><main>{_header(document, ordered)}{body}<footer>Made by automodel from its own measurements. "
        'Nothing on this page is loaded from elsewhere.</footer></main><div id="tip"></div>'
        f"<script>{script}</script></body></html>\n"
    )


def _side_colours() -> str:
    light = "".join(f"--side-{i}:{pair[0]};" for i, pair in enumerate(COLOURS))
    dark = "".join(f"--side-{i}:{pair[1]};" for i, pair in enumerate(COLOURS))
    rules = "".join(
        f".plot path.side-{i}{{stroke:var(--side-{i})}}.key.side-{i}::before{{background:var(--side-{i})}}"
        f".balance .track i.side-{i}{{background:var(--side-{i})}}"
        for i in range(len(COLOURS))
    )
    others = ",".join(f".plot path.line.side-{i}" for i in range(1, len(COLOURS)))
    rules += f"{others}{{stroke-width:5;opacity:.45}}"  # equal curves lie on top of each other and all stay visible
    return f":root{{{light}}}@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}{rules}"


def _colour(index: int) -> str:
    return f"side-{index % len(COLOURS)}"


def _header(document: dict[str, Any], sides: Sequence[dict[str, Any]]) -> str:
    found, system, job = document["results"]["improvements"], document["system_info"], document["job"]
    baseline, size = document["results"]["baseline"]["method"], job["parameters"]
    facts = [
        job["task"],
        machine_name(system),
        f"{f'{size / 1e6:,.1f}M' if size >= 1e5 else f'{size:,}'} parameters",
        f"{job['total_steps']} steps",
    ]
    spans = "".join(f"<span>{escape(str(fact))}</span>" for fact in facts)
    kind, saved = sides[0]["memory_kind"], found["memory_reduction_percent"]
    cards = (
        ("Training time", f"{found['speedup_factor']:.2f}<small>x the speed</small>", f"of {baseline}", " lead"),
        ("Step", f"{found['step_speedup']:.2f}<small>x the speed</small>", "median, steady state", ""),
        (
            "Process start to end",
            f"{found['wall_speedup']:.2f}<small>x the speed</small>",
            "with imports and saving",
            "",
        ),
        ("Peak memory", f"{abs(saved):.0f}<small>% {'less' if saved >= 0 else 'more'}</small>", f"{kind} memory", ""),
    )
    shown = "".join(
        f'<div class="card{lead}"><div class="label">{escape(label)}</div>'
        f'<div class="value">{value}</div><div class="sub">{escape(sub)}</div></div>'
        for label, value, sub, lead in cards
    )
    return (
        '<header><p class="kicker">Performance comparison</p>'
        f"<h1>automodel against {escape(baseline)}</h1>"
        f'<p class="facts">{spans}</p></header><div class="cards">{shown}</div>'
    )


def _results_table(sides: Sequence[dict[str, Any]]) -> str:
    head = "".join(f'<th scope="col" class="num">{escape(side["method"])}</th>' for side in sides)
    rows = []
    for name, shown, improvement in metric_rows(sides[0]):
        cells = "".join(f'<td class="num">{escape(shown(side))}</td>' for side in sides)
        gain = escape(improvement(sides[1], sides[0]))
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}<td class="num">{gain}</td></tr>')
    return (
        '<div class="panel scroll"><table class="rows"><thead><tr><th></th>'
        f'{head}<th class="num">Improvement</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _curves(title: str, key: str, sides: Sequence[dict[str, Any]], log: bool) -> str:
    series = [
        Series(side["method"], [(float(step), value) for step, value in enumerate(side[key], start=1)], _colour(i))
        for i, side in enumerate(sides)
    ]
    series = [*series[1:], series[0]]  # ours is drawn last, thin, over the others' broad lines
    return line_chart(title, series, log_toggle=log, tall=True)


def _agreement(document: dict[str, Any], sides: Sequence[dict[str, Any]]) -> str:
    labels = {side["provider"]: side["method"] for side in sides}
    lines = [line for found in document["agreement"] for line in agreement_lines(found, labels[found["against"]])]
    return "".join(f'<p class="note">{escape(line)}</p>' for line in lines)


def bar_chart(title: str, note: str, bars: Sequence[tuple[str, float, str, str]]) -> str:
    """Horizontal bars: (name, value, text, colour class)."""
    most = max((value for _, value, _, _ in bars), default=0.0) or 1.0
    rows = "".join(
        f'<div class="row"><span class="name" title="{escape(name)}">{escape(name)}</span><span class="track">'
        f'<i class="{colour}" style="width:{value / most * 100:.2f}%"></i></span>'
        f'<span class="count">{escape(text)}</span></div>'
        for name, value, text, colour in bars
    )
    return (
        f'<figure class="chart"><figcaption><span>{escape(title)}</span><span class="legend">{escape(note)}</span>'
        f'</figcaption><div class="balance">{rows}</div></figure>'
    )


def _bars(sides: Sequence[dict[str, Any]]) -> str:
    charts = [
        bar_chart(
            title,
            note,
            [(side["method"], side[key], f"{side[key]:,.1f} {unit}", _colour(i)) for i, side in enumerate(sides)],
        )
        for title, key, unit, note in BARS
    ]
    return f'<div class="grid-2">{"".join(charts)}</div>'


def _memory(sides: Sequence[dict[str, Any]]) -> str:
    if sides[0]["memory_kind"] == "host":
        kinds = [("Peak host memory", "peak_host_gib", "highest resident size of the process")]
    else:
        kinds = [
            ("Peak GPU memory, allocated", "peak_allocated_gib", "by tensors"),
            ("Peak GPU memory, reserved", "peak_reserved_gib", "taken from the device by the allocator"),
        ]
    charts = [
        bar_chart(title, note, [(s["method"], s[key], f"{s[key]:.2f} GiB", _colour(i)) for i, s in enumerate(sides)])
        for title, key, note in kinds
    ]
    return f'<div class="grid-2">{"".join(charts)}</div>'


def _ladder(rungs: Sequence[dict[str, Any]]) -> str:
    done = [rung for rung in rungs if rung["status"] != "failed"]
    if not done:
        return ""
    first = done[0]["training_time"]
    bars = [
        (r["rung"], first / r["training_time"], f"{first / r['training_time']:.1f}x · {r['ms_per_step']:.2f} ms a step",
         _colour(0 if r["provider"].startswith(OURS) else 1))
        for r in done
    ]  # fmt: skip
    return bar_chart("Cumulative speedup in training time", "every line adds one thing to the one above it", bars)


def _order(document: dict[str, Any]) -> str:
    labels = {side["provider"]: side["method"] for side in document["sides"].values()}
    others = [labels[found["against"]] for found in document["agreement"] if not found["same_data_order"]]
    kept = f", but for {', '.join(others)}: rows of similar lengths together" if others else ""
    return f"{'shuffled, ' if document['job']['shuffle'] else ''}the same on every side{kept}"


def machine_name(system: dict[str, Any]) -> str:
    """The GPU's name, or the processor's where there is no GPU."""
    return system["processor"] if system["gpu_name"] == "CPU" else f"{system['gpu_name']}, {system['processor']}"


def _of_each(document: dict[str, Any], key: str) -> str:
    return ", ".join(f"{side['method']} {side[key]}" for side in document["sides"].values())


def _facts(document: dict[str, Any]) -> str:
    job, system, optimizer = document["job"], document["system_info"], document["job"]["optimizer"]
    facts = {
        "Command": document["command"],
        "Batch": f"{job['micro_batch_size']} × {job['grad_acc_steps']}, {job['steps_per_epoch']} steps an epoch",
        "Steps": f"{job['total_steps']}, the first {job['warmup_steps']} not in the steady state",
        "Optimizer": f"{optimizer['name']}, lr {optimizer['lr']:g}, {job['lr_scheduler']['name']} schedule",
        "Data order": _order(document),
        "Precision": _of_each(document, "precision"),
        "Attention": _of_each(document, "attention"),
        "Threads": _of_each(document, "threads"),
        "Machine": f"{machine_name(system)}, {system['cores']} cores",
        "Versions": ", ".join(f"{name} {system[key]}" for name, key in VERSIONS.items()),
        **{f"Note {i}": note for i, note in enumerate(document["notes"], start=1)},
    }
    rows = "".join(
        f'<tr><th scope="row">{escape(k)}</th><td class="value">{escape(str(v))}</td></tr>' for k, v in facts.items()
    )
    return f'<div class="panel"><table class="rows"><tbody>{rows}</tbody></table></div>'
