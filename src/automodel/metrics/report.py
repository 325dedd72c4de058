"""`report.html`: one file that tells the story of a run.

It is a pure function of the run folder's files (config.yaml, plan.json, metrics.jsonl, data.json, summary.json), so it
can be made again at any time, also for a run that was interrupted or killed. It loads nothing from anywhere: a content
security policy forbids it, and allows the one script of the page by its hash, so that even a label named `<script>`
that slipped through the escaping would stay text.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections.abc import Callable
from html import escape
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from automodel.config.own_files import for_the_owner
from automodel.metrics import report_sections as sections
from automodel.metrics.progress import duration, format_value, title
from automodel.metrics.report_charts import absent
from automodel.metrics.report_files import RunFiles, read_run, run_folder

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_LEADING = ("f1_micro", "entity_f1", "perplexity", "accuracy", "spearman")  # the metric a run is known by, first found
_SECTIONS: dict[str, Callable[[RunFiles], str]] = {
    "Loss": sections.loss_section,
    "Validation": sections.validation_section,
    "Confusion matrix": sections.confusion_section,
    "Training": sections.training_section,
    "Data": sections.data_section,
    "Plan": sections.plan_section,
    "Environment": sections.environment_section,
    "Configuration": sections.config_section,
}
AGAIN_S = 30  # after so many seconds a page of a run that goes on is loaded again
_STATUS = {"finished": "good", "stopped early": "good", "interrupted": "warn"}


def write_report(run_dir: Path, running: bool = False) -> Path:
    """Write `report.html` into the `run/` folder (or into `run/` of the folder given) and return its path. `running`:
    the run goes on, and the page loads itself again from time to time."""
    folder = run_folder(run_dir)
    path = folder / "report.html"
    temporary = folder / "report.html.tmp"
    page = render_report(read_run(folder, running))
    with open(temporary, "w", encoding="utf-8", opener=for_the_owner) as file:  # it shows the config
        file.write(page)
    os.replace(temporary, path)
    return path


def render_report(run: RunFiles) -> str:
    """The page as text."""
    here = Path(__file__)
    style = here.with_name("report.css").read_text(encoding="utf-8")
    script = here.with_name("report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    parts = ((heading, _made(make, run)) for heading, make in _SECTIONS.items())
    body = "".join(f"<section><h2>{heading}</h2>{content}</section>" for heading, content in parts if content)
    name = escape(_model_name(run))
    again = f'<meta http-equiv="refresh" content="{AGAIN_S}">' if run.as_of else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{again}'
        f"<title>{name}: fine-tuning report</title>\n<style>{style}</style></head>\n"
        f"<body><main>{_made(_header, run)}{_made(_cards, run)}{body}<footer>{_footer(run)}</footer></main>"
        f'<div id="tip"></div><script>{script}</script></body></html>\n'
    )


def _made(make: Callable[[RunFiles], str], run: RunFiles) -> str:
    """A section; one whose file has an unexpected form says so, and the others are still there."""
    try:
        return make(run)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return absent(f"This part could not be made from the run's files ({type(error).__name__}: {error}).")


def _header(run: RunFiles) -> str:
    summary = run.summary or {}
    status = f"running, as of {run.as_of}" if run.as_of else str(summary.get("status") or "not finished")
    kind = "warn" if run.as_of else _STATUS.get(status, "bad")
    task = summary.get("task") or (run.plan or {}).get("task")
    facts = [task, short_name(run.name_of("dataset", "path")), summary.get("device")]
    if _is_number(summary.get("parameters")):
        facts.append(f"{_short(summary['parameters'])} parameters")
    spans = "".join(f"<span>{escape(str(f))}</span>" for f in facts if f)
    broken = [step for step, value in run.points("train", "loss") if not math.isfinite(value)]
    alert = ""
    if broken:
        alert = (
            f'<p class="alert">The training loss stopped being a number at step {broken[0]:,.0f}. '
            "A lower learning rate, a longer warm-up or gradient clipping usually helps.</p>"
        )
    return (
        '<header><p class="kicker">Fine-tuning report</p>'
        f"<h1>{escape(_model_name(run))}</h1>"
        f'<p class="facts"><span class="status {kind}">{escape(status)}</span>{spans}</p>'
        f"{alert}</header>"
    )


def _cards(run: RunFiles) -> str:
    cards = [_result_card(run), *_cost_cards(run), _best_card(run)]
    return f'<div class="cards">{"".join(c for c in cards if c)}</div>'


def _result_card(run: RunFiles) -> str:
    """What the run achieved: its leading validation metric, or the training loss."""
    summary = run.summary or {}
    evaluations = run.lines("validation")
    found = summary.get("validation") or (evaluations[-1] if evaluations else {})
    found = {n: v for n, v in found.items() if _is_number(v) and n not in ("step", "epoch", "time")}
    lead = next((n for n in (*_LEADING, "loss") if n in found), None)
    if lead is not None:
        others = [n for n in ("loss", "f1", "mcc", "pearson", "rmse", "accuracy") if n in found and n != lead][:2]
        sub = " · ".join(f"{_lower(title(n))} {format_value(found[n])}" for n in others)
        label = f"Validation {_lower(title(lead))}"
        return _card(label, _metric(lead, found[lead]), sub, "lead" if math.isfinite(found[lead]) else "bad")
    losses = [value for _, value in run.points("train", "loss")]
    if losses:
        kind = "lead" if math.isfinite(losses[-1]) else "bad"
        return _card("Training loss", format_value(losses[-1]), "at the last logged step", kind)
    return _card("Result", "–", "nothing was logged")


def _cost_cards(run: RunFiles) -> list[str]:
    """Time, speed and memory; from the last log lines where there is no summary."""
    summary, last = run.summary or {}, (run.lines("train") or [{}])[-1]
    cards = []
    wall = summary.get("wall_s") or last.get("time")
    if _is_number(wall):
        sub = []
        if _is_number(summary.get("train_s")):
            sub.append(f"{duration(summary['train_s'])} training")
        if _is_number(summary.get("seconds_per_epoch")):
            sub.append(f"{duration(summary['seconds_per_epoch'])} per epoch")
        cards.append(_card("Wall time", duration(wall), "<br>".join(sub)))
    speed = summary.get("tokens_per_s") or last.get("tokens_per_s")
    if _is_number(speed):
        samples = summary.get("samples_per_s") or last.get("samples_per_s")
        sub = f"{samples:,.1f} examples/s" if _is_number(samples) else ""
        cards.append(_card("Throughput", f"{speed:,.0f}<small>tokens/s</small>", sub))
    memory = [value for _, value in run.points("train", "memory_gib")]
    peak = summary.get("peak_memory_gib") or max(memory, default=None)
    if _is_number(peak):
        where = "GPU memory" if (run.plan or {}).get("device") == "cuda" else "host memory"
        cards.append(_card("Peak memory", f"{peak:.2f}<small>GiB</small>", where))
    return cards


def _best_card(run: RunFiles) -> str:
    summary = run.summary or {}
    steps = summary.get("steps") or max((line["step"] for line in run.metrics), default=None)
    best = summary.get("best")
    if isinstance(best, dict) and _is_number(best.get("value")):
        sub = f"by {_lower(title(str(best.get('metric'))))} {format_value(best['value'])}"
        return _card("Best step", f"{best.get('step'):,}<small>of {steps:,}</small>" if steps else "–", escape(sub))
    total = (run.plan or {}).get("total_steps")
    if not _is_number(steps):
        return ""
    epochs = summary.get("epochs")
    sub = f"{epochs:.2f} epochs" if _is_number(epochs) else ""
    return _card("Steps", f"{steps:,}" + (f"<small>of {total:,}</small>" if _is_number(total) else ""), sub)


def _card(label: str, value: str, sub: str, kind: str = "") -> str:
    """`value` and `sub` are HTML; everything put into them is a formatted number or escaped."""
    return (
        f'<div class="card {kind}"><div class="label">{escape(label)}</div>'
        f'<div class="value">{value}</div><div class="sub">{sub}</div></div>'
    )


def _footer(run: RunFiles) -> str:
    version = ((run.summary or {}).get("versions") or {}).get("automodel")
    made_by = f"automodel {escape(str(version))}" if version else "automodel"
    return f"Made by {made_by} from the files of the run folder. Nothing on this page is loaded from elsewhere."


def _model_name(run: RunFiles) -> str:
    return short_name(run.name_of("model", "pretrained_model_name_or_path", "name")) or "A run without a name"


def short_name(name: str | None) -> str | None:
    """A hub name as it is; of a long local path the last two parts. The whole path stands under Environment."""
    if name is None or not name.startswith(("/", "~")):
        return name
    return "/".join(PurePath(name).parts[-2:])


def _metric(name: str, value: float) -> str:
    """Shares as percentages; everything else as it is logged."""
    shares = ("accuracy", "entity_f1", "f1_micro")
    return f"{value * 100:.1f}<small>%</small>" if name in shares and math.isfinite(value) else format_value(value)


def _short(count: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:g}"


def _lower(text: str) -> str:
    """Lower case, but neither abbreviations nor people."""
    return text if text[1:2].isupper() or text[1:2].isdigit() or text in ("Pearson", "Spearman") else text.lower()


def _is_number(value: Any) -> TypeIs[int | float]:
    return isinstance(value, int | float)
