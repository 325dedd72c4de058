"""Charts of the report: plain functions from numbers to HTML.

A line chart is an SVG stretched over its box (`preserveAspectRatio="none"`, strokes that do not scale) with its tick
labels as HTML beside it. So it fills any width, from a phone to paper, and its text never shrinks; no script is needed
to draw. Dots are zero-length strokes with round caps, which stay round when the box is stretched. The little script of
`report.js` adds the tooltip, from the JSON in `data-points`.

Everything that comes from a file goes through `escape` here or in `report_sections.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from automodel.metrics.progress import format_value

Point = tuple[float, float]

WIDTH, HEIGHT = 1000.0, 300.0  # of the viewBox; the page decides the real size
FEWEST_SMOOTHED = 20  # fewer points speak for themselves
LONG_NAME = 16  # letters of a class, for which the bars make room
MOST_POINTS = 600  # for each series: beyond it a screen shows nothing more, and the file only grows


@dataclass(frozen=True)
class Series:
    """A line, or dots with a smoothed line over them."""

    name: str
    points: list[Point]
    """(step, value); values may be NaN, which leaves a gap."""
    colour: str
    """A CSS class: `train`, `validation` or `plain`."""
    smooth: bool = False
    dots: bool = False


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    last_step: float = 0,
    log_toggle: bool = False,
    tall: bool = False,
    lost_from: float | None = None,
    note: str = "",
    from_zero: bool = False,
) -> str:
    """A figure with one or more series over the steps from 0 to `last_step`, the same for all charts of a page.

    From `lost_from` on the values were not numbers; that stretch is shaded. `from_zero`: the axis begins there, so that
    a level line looks level."""
    series = [Series(s.name, _finite(s.points), s.colour, s.smooth, s.dots) for s in series]
    series = [s for s in series if s.points]
    if not series:
        return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{absent("Nothing was logged.")}</figure>'
    low_x, high_x = 0.0, last_step or max(x for s in series for x, _ in s.points)
    values = [y for s in series for _, y in s.points] + ([0.0] if from_zero else [])
    log_toggle = log_toggle and min(values) > 0
    layers = _layer(series, values, (low_x, high_x), "linear", log=False)
    if log_toggle:
        layers += _layer(series, values, (low_x, high_x), "log", log=True)
    if lost_from is not None and high_x:
        layers = f'<div class="lost" style="left:{lost_from / high_x * 100:.2f}%"></div>{layers}'
    legend = "".join(f'<span class="key {s.colour}">{escape(s.name)}</span>' for s in series) if len(series) > 1 else ""
    switch = '<label class="switch"><input type="checkbox"> log scale</label>' if log_toggle else ""
    footnote = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<figure class="chart{" tall" if tall else ""}">'
        f'<figcaption><span>{escape(title)}</span><span class="legend">{legend}{switch}</span></figcaption>'
        f'<div class="plot" data-points="{escape(_tooltip_data(series, low_x, high_x))}">{layers}'
        f"{_x_labels(low_x, high_x)}</div>{footnote}</figure>"
    )


def _layer(series: Sequence[Series], values: list[float], x_range: Point, name: str, log: bool) -> str:
    """The marks and the y axis, on a linear or a logarithmic scale."""
    ticks = log_ticks(min(values), max(values)) if log else nice_ticks(min(values), max(values))
    low, high = ticks[0], ticks[-1]

    def place(point: Point) -> Point:
        x = (point[0] - x_range[0]) / (x_range[1] - x_range[0]) if x_range[1] > x_range[0] else 0.0
        if log:
            y = (math.log(point[1]) - math.log(low)) / (math.log(high) - math.log(low))
        else:
            y = (point[1] - low) / (high - low)
        return x * WIDTH, (1 - y) * HEIGHT

    grid, labels = [], []
    for tick in ticks:
        _, y = place((x_range[0], tick))
        grid.append(f"M0 {y:.1f}H{WIDTH:.0f}")
        labels.append(f'<span style="top:{y / HEIGHT * 100:.2f}%">{tick_text(tick, ticks)}</span>')
    marks = "".join(_marks(s, place) for s in series)
    return (
        f'<div class="layer {name}"><svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" '
        f'aria-hidden="true"><path class="grid" d="{"".join(grid)}"/>{marks}</svg>'
        f'<div class="y-axis">{"".join(labels)}</div></div>'
    )


def _marks(series: Series, place: Callable[[Point], Point]) -> str:
    """Raw values as dots or a line; smoothed, the raw ones step back behind the line."""
    raw = [place(p) for p in thinned(series.points)]
    dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in raw)
    if series.smooth and len(series.points) >= FEWEST_SMOOTHED:
        line = [place(p) for p in _every(smoothed(series.points), MOST_POINTS)]
        return f'<path class="dots faint {series.colour}" d="{dots}"/>{_polyline(line, series.colour)}'
    as_dots = f'<path class="dots {series.colour}" d="{dots}"/>' if series.dots or len(raw) < FEWEST_SMOOTHED else ""
    return _polyline(raw, series.colour) + as_dots


def _polyline(points: list[Point], colour: str) -> str:
    return f'<path class="line {colour}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'


def _x_labels(low: float, high: float) -> str:
    ticks = [t for t in nice_ticks(low, high, about=6, whole=True) if low <= t <= high]
    spans = "".join(f'<span style="left:{(t - low) / (high - low) * 100:.2f}%">{t:,.0f}</span>' for t in ticks)
    return f'<div class="x-axis">{spans}</div>'


def _tooltip_data(series: Sequence[Series], low: float, high: float) -> str:
    """JSON for the script: [x in 0…1, step, [[name, value, colour], …]] in order of steps."""
    steps = sorted({x for s in series for x, _ in _every(s.points, MOST_POINTS // 2)})
    values = [(s, dict(s.points)) for s in series]  # all of them: a validation step also shows the training value
    rows = []
    for step in steps:
        shown = [[s.name, _tip_text(at[step]), s.colour] for s, at in values if step in at]
        rows.append([round((step - low) / (high - low), 4) if high > low else 0.0, int(step), shown])
    return json.dumps(rows, separators=(",", ":"))


def _tip_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else format_value(value)


def smoothed(points: list[Point]) -> list[Point]:
    """The mean of two exponential means, one from either end: unlike a single one it does not lag behind a fall."""
    decay = 1.0 - 1.0 / max(2.0, math.sqrt(len(points)) / 2)
    values = [y for _, y in points]
    forward, backward = _exponential_mean(values, decay), _exponential_mean(values[::-1], decay)[::-1]
    return [(x, (f + b) / 2) for (x, _), f, b in zip(points, forward, backward)]


def _exponential_mean(values: list[float], decay: float) -> list[float]:
    """Corrected for its start, where there is little to average."""
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        mean = decay * mean + (1.0 - decay) * value
        weight = decay * weight + (1.0 - decay)
        out.append(mean / weight)
    return out


def thinned(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """About `most` points; each stretch keeps its lowest and highest, so that no spike disappears, and two others."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 4))
    kept: list[Point] = []
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        chosen = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept.extend(sorted(chosen | {stretch[0], stretch[len(stretch) // 2]}))
    return kept


def _every(points: list[Point], most: int) -> list[Point]:
    """Evenly chosen points, the last one always among them."""
    if len(points) <= most:
        return points
    stride = math.ceil(len(points) / most)
    kept = points[::stride]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _finite(points: list[Point]) -> list[Point]:
    return [p for p in points if math.isfinite(p[1])]


def nice_ticks(low: float, high: float, about: int = 4, whole: bool = False) -> list[float]:
    """About as many round numbers as asked for, covering the range."""
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1–2–5 numbers that cover the range, or powers of ten where there are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    dense = [m * 10.0**p for p in powers for m in (1, 2, 5)]
    candidates = dense if len(powers) <= 3 else [10.0**p for p in powers]
    below = max((t for t in candidates if t <= low), default=low)
    above = min((t for t in candidates if t >= high and t > below), default=high if high > below else below * 2)
    return [below, *(t for t in candidates if below < t < above), above]


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """As few digits as tell the ticks apart: 0.25, 12k, 4e-5."""
    size = max(abs(t) for t in ticks)
    if value == 0:
        return "0"
    if 0 < size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    unit, letter = (1e6, "M") if size >= 1e6 else (1e3, "k") if size >= 1e4 else (1.0, "")
    for digits in range(4, 12):
        if len({f"{t / unit:.{digits}g}" for t in ticks}) == len(set(ticks)):
            break
    return f"{value / unit:.{digits}g}{letter}"


def histogram(title: str, edges: Sequence[float], counts: Sequence[float], unit: str) -> str:
    """Upright bars over the bins of `edges`."""
    most = max(counts, default=0) or 1
    total = sum(counts) or 1
    bars = []
    for left, right, count in zip(edges, edges[1:], counts):
        text = escape(f"{left:,.0f}–{right:,.0f} {unit}: {count:,.0f} ({count / total:.1%})")
        bars.append(f'<i style="height:{count / most * 100:.2f}%" data-tip="{text}"></i>')
    places = [0, len(edges) // 2, len(edges) - 1]
    labels = "".join(
        f'<span style="left:{i / max(1, len(edges) - 1) * 100:.1f}%">{edges[i]:,.0f}</span>'
        for i in sorted(set(places))
    )
    return (
        f'<figure class="chart"><figcaption><span>{escape(title)}</span>'
        f'<span class="legend">{escape(unit)} per example</span></figcaption>'
        f'<div class="bars">{"".join(bars)}</div><div class="x-axis under">{labels}</div></figure>'
    )


def balance(
    title: str, names: Sequence[str], counts: Sequence[float], total: float | None = None, most_shown: int = 20
) -> str:
    """Horizontal bars, largest first where there are more than are shown. Shares are of `total`, or of the sum."""
    total, most = total or sum(counts) or 1, max(counts, default=0) or 1
    pairs = list(zip(names, counts))
    hidden = 0
    if len(pairs) > most_shown:
        pairs = sorted(pairs, key=lambda pair: -pair[1])
        hidden = len(pairs) - most_shown
    rows = "".join(
        f'<div class="row"><span class="name" title="{escape(str(name))}">{escape(str(name))}</span>'
        f'<span class="track"><i style="width:{count / most * 100:.2f}%"></i></span>'
        f'<span class="count">{count:,.0f} <small>{count / total:.1%}</small></span></div>'
        for name, count in pairs[:most_shown]
    )
    more = f'<p class="note">and {hidden:,} more classes</p>' if hidden else ""
    long = " long" if any(len(str(name)) > LONG_NAME for name, _ in pairs[:most_shown]) else ""
    return (
        f'<figure class="chart"><figcaption><span>{escape(title)}</span></figcaption>'
        f'<div class="balance{long}">{rows}</div>{more}</figure>'
    )


def heat_map(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """The confusion matrix: true classes as rows, counts with their share of the row; blue is right."""
    head = "".join(f'<th scope="col"><span title="{escape(n)}">{escape(n)}</span></th>' for n in names)
    rows = []
    for i, counts in enumerate(matrix):
        total = sum(counts)
        cells = []
        for j, count in enumerate(counts):
            share = count / total if total else 0.0
            kind = "right" if i == j else "wrong"
            tip = escape(f"{names[i]} taken for {names[j]}: {count:,} of {total:,} ({share:.1%})")
            shown = f"{count:,}<small>{share:.0%}</small>"
            cells.append(f'<td class="{kind}" style="--share:{share:.3f}" data-tip="{tip}">{shown}</td>')
        rows.append(
            f'<tr><th scope="row"><span title="{escape(names[i])}">{escape(names[i])}</span></th>{"".join(cells)}</tr>'
        )
    return (
        '<div class="scroll"><table class="heat"><thead><tr><td class="corner">true ↓ · predicted →</td>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def absent(text: str) -> str:
    """What a section says instead of its content."""
    return f'<p class="absent">{escape(text)}</p>'
