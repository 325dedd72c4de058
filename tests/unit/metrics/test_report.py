"""The report as a document: complete, harmless, self-contained, and made from whatever is there."""

import base64
import hashlib
import json
import math
import re
from html import unescape
from html.parser import HTMLParser

import pytest

from automodel.metrics.report import duration, write_report
from automodel.metrics.report_charts import (
    Series,
    balance,
    line_chart,
    log_ticks,
    nice_ticks,
    smoothed,
    thinned,
    tick_text,
)

KINDS = ["classification", "causal_lm", "regression", "diverged"]
VOID = {"meta", "br", "input", "link", "img", "hr", "path"}


class Page(HTMLParser):
    """Checks that tags are balanced and collects what a test looks at."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)


def report(folder):
    return write_report(folder).read_text(encoding="utf-8")


def words(html):
    return " ".join(" ".join(Page(html).text).split())


@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_well_formed_and_load_nothing(tmp_path, example_runs, kind):
    html = report(getattr(example_runs, kind)(tmp_path))
    page = Page(html)
    assert page.tags.count("script") == 1
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not [a for a in page.attributes if a[0] in ("src", "href", "srcset", "action")]
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest", html)
    assert not [a for a in page.attributes if a[0].startswith("on")]


def test_the_policy_allows_exactly_the_script_of_the_page(tmp_path, example_runs):
    html = report(example_runs.classification(tmp_path))
    script = re.search(r"<script>(.*?)</script>", html, re.S).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in html


def test_classification_shows_everything(tmp_path, example_runs):
    text = words(report(example_runs.classification(tmp_path)))
    for expected in (
        "sentence-transformers/all-MiniLM-L6-v2",
        "finished",
        "22.7M parameters",
        "Validation accuracy 85.4 %",
        "Wall time 2 min 11 s 1 min 52 s training",
        "Throughput 5,180 tokens/s",
        "Peak memory 1.31 GiB host memory",
        "Best step 100 of 125 by loss 0.387",
        "Loss by step training validation log scale",
        "Confusion matrix true ↓ · predicted → negative positive negative 181 86% 29 14%",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
        "Memory, GiB",
        "Lengths, train",
        "Labels, validation negative 210 52.5%",
        "Skipped rows of train (the first 3 of 3) Row Reason 17 empty text",
        "path packed BERT attention can be packed: no padding is computed",
        "torch 2.13.0",
        "config.yaml, 13 lines",
        "pretrained_model_name_or_path : sentence-transformers/all-MiniLM-L6-v2",
    ):
        assert expected in text, expected


def test_numbers_by_class_follow_from_the_matrix(tmp_path, example_runs):
    text = words(report(example_runs.classification(tmp_path)))
    precision, recall = 181 / (181 + 24), 181 / 210
    f1 = 2 * precision * recall / (precision + recall)
    assert f"negative 210 {precision:.3f} {recall:.3f} {f1:.3f}" in text


def test_the_best_evaluation_is_marked(tmp_path, example_runs):
    html = report(example_runs.classification(tmp_path))
    assert re.findall(r'<tr class="best"><td class="num">([\d,]+)</td>', html) == ["100"]


def test_language_models_lead_with_perplexity_and_have_no_matrix(tmp_path, example_runs):
    text = words(report(example_runs.causal_lm(tmp_path)))
    assert "Validation perplexity 3.2" in text
    assert "GPU memory" in text
    assert "Confusion matrix" not in text


def test_regression_with_one_evaluation_shows_a_table(tmp_path, example_runs):
    text = words(report(example_runs.regression(tmp_path)))
    assert "Validation Spearman 0.858" in text
    assert "Step Loss MSE RMSE MAE Pearson Spearman R2 60 0.520 0.520 0.721" in text


def test_an_interrupted_run_with_a_diverged_loss_says_both(tmp_path, example_runs):
    html = report(example_runs.diverged(tmp_path))
    text = words(html)
    assert "not finished" in text
    assert "The training loss stopped being a number at step 140." in text
    assert "not a number at 6 logged steps, first at step 140" in text
    assert f'<div class="lost" style="left:{140 / 190 * 100:.2f}%">' in html
    assert "Training loss NaN" in text
    assert "sentence-transformers/all-MiniLM-L6-v2" in text  # from the config: there is no summary
    assert "summary.json is missing." in text
    assert "data.json is missing." in text


def test_the_report_is_a_function_of_the_files(tmp_path, example_runs):
    first = report(example_runs.classification(tmp_path / "a"))
    again = report(tmp_path / "a")
    elsewhere = report(example_runs.classification(tmp_path / "b" / "run"))
    assert first == again == elsewhere


def test_the_folder_above_run_is_understood(tmp_path, example_runs):
    example_runs.classification(tmp_path / "run")
    assert write_report(tmp_path) == tmp_path / "run" / "report.html"


@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "metrics.jsonl", "data.json", "summary.json"])
def test_a_missing_file_is_said_and_the_rest_is_there(tmp_path, example_runs, name):
    example_runs.classification(tmp_path)
    (tmp_path / name).unlink()
    text = words(report(tmp_path))
    assert f"{name} is missing." in text
    assert "Fine-tuning report" in text


def test_an_empty_folder_still_makes_a_page(tmp_path):
    text = words(report(tmp_path))
    assert text.count("is missing.") == 6  # metrics.jsonl is needed twice
    assert "A run without a name" in text


@pytest.mark.parametrize("name", ["plan.json", "data.json", "summary.json"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_file_is_said(tmp_path, example_runs, name, content):
    example_runs.classification(tmp_path)
    (tmp_path / name).write_text(content)
    assert f"{name} could not be read: " in words(report(tmp_path))


def test_a_damaged_metrics_file_is_said(tmp_path, example_runs):
    example_runs.classification(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text("junk\n" + path.read_text())
    assert "metrics.jsonl could not be read" in words(report(tmp_path))


def test_a_file_of_another_form_costs_only_its_section(tmp_path, example_runs):
    example_runs.classification(tmp_path)
    example_runs.write(tmp_path, "data.json", {"train": {"length_histogram": {"edges": "x", "counts": ["y"]}}})
    text = words(report(tmp_path))
    assert "This part could not be made from the run's files" in text
    assert "Confusion matrix" in text


def test_the_plan_has_two_parts(tmp_path, example_runs):
    example_runs.classification(tmp_path)
    lines = [{"name": name, "value": "v", "reason": "r", "asked": name == "data"} for name in ("data", "workers")]
    example_runs.write(tmp_path, "plan.json", {"decisions": lines})
    asked, how = report(tmp_path).split("<details><summary>How it is done</summary>")
    assert "<th>data</th>" in asked
    assert "<th>workers</th>" not in asked
    assert "<th>workers</th>" in how


EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def test_nothing_from_a_file_becomes_markup(tmp_path, example_runs):
    example_runs.classification(tmp_path, names=(EVIL, "'&<b>"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    summary |= {"model": EVIL, "dataset": EVIL, "device": EVIL, "task": EVIL, "status": EVIL, "versions": {EVIL: EVIL}}
    summary["best"] = {"step": 100, "metric": EVIL, "value": 0.5}
    summary["validation"] = {EVIL: 0.5, "loss": 0.4}
    example_runs.write(tmp_path, "summary.json", summary)
    plan = {"task": EVIL, "device": EVIL, "decisions": [{"name": EVIL, "value": EVIL, "reason": EVIL}]}
    example_runs.write(tmp_path, "plan.json", plan)
    data = json.loads((tmp_path / "data.json").read_text())
    data["train"]["skipped_rows"] = [{"row": 1, "reason": EVIL}]
    example_runs.write(tmp_path, "data.json", data)
    example_runs.write(tmp_path, "config.yaml", f"model:\n  {EVIL}: '{EVIL}'\n# {EVIL}\n")
    lines = (tmp_path / "metrics.jsonl").read_text()
    evil_line = json.dumps({"step": 126, "split": "validation", "loss": 0.4, EVIL: 0.5})
    example_runs.write(tmp_path, "metrics.jsonl", lines + evil_line + "\n")

    html = report(tmp_path)
    page = Page(html)
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert "b" in page.tags  # the config's keys, ours
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert html.count("<script>") == 1
    assert unescape(html).count("alert(1)") > 15  # it is all there, as text


def test_tooltips_carry_the_values_of_every_series(tmp_path, example_runs):
    html = report(example_runs.causal_lm(tmp_path))
    points = json.loads(unescape(re.search(r'data-points="(.*?)"', html).group(1)))
    at_500 = next(p for p in points if p[1] == 500)
    assert at_500[0] == pytest.approx(500 / 3000, abs=1e-3)
    assert [name for name, _, _ in at_500[2]] == ["training", "validation"]
    assert [p[0] for p in points] == sorted(p[0] for p in points)


def test_long_runs_make_small_files(tmp_path, example_runs):
    example_runs.causal_lm(tmp_path, steps=20_000)
    assert write_report(tmp_path).stat().st_size < 400_000


def test_many_classes_become_a_list_of_confusions(tmp_path, example_runs):
    example_runs.classification(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    matrix = [[50 if i == j else 0 for j in range(60)] for i in range(60)]
    matrix[3][7] = 50
    summary |= {"confusion_matrix": matrix, "label_names": [f"class {i}" for i in range(60)]}
    example_runs.write(tmp_path, "summary.json", summary)
    assert "True Predicted Count Of the true class class 3 class 7 50 50.0%" in words(report(tmp_path))


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0.0, 1.0),
        (0.31, 0.74),
        (3, 3),
        (0, 0),
        (-5, 2),
        (1e-9, 4e-5),
        (0, 91_422),
        (0.999, 1.0),
        (0.413211, 0.413254),
        (23_456.1, 23_456.9),
    ],
)
def test_ticks_cover_the_range_and_are_few(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-12
    assert ticks[-1] >= high - 1e-12
    assert 3 <= len(ticks) <= 7
    assert len({tick_text(t, ticks) for t in ticks}) == len(ticks)


def test_several_labels_an_example(tmp_path, example_runs):
    """Shares are of the examples, not of the labels, and the leading metric is not that all labels are right."""
    folder = example_runs.classification(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    summary["problem_type"] = "multi_label_classification"
    summary["validation"] = {"loss": 0.4, "accuracy": 0.1, "f1_micro": 0.75}
    (folder / "summary.json").write_text(json.dumps(summary))
    data = json.loads((folder / "data.json").read_text())
    data["validation"] |= {"used": 400, "label_counts": [300, 200]}
    (folder / "data.json").write_text(json.dumps(data))
    text = words(report(folder))
    assert "Validation F1 (micro) 75.0 %" in text
    assert "Labels, validation negative 300 75.0% positive 200 50.0%" in text


def test_memory_begins_at_zero_and_long_names_have_room(tmp_path):
    figure = line_chart("Memory", [Series("Memory", [(1, 7.1), (2, 7.101)], "train")], from_zero=True)
    assert '">0</span>' in figure
    assert '">8</span>' in figure
    assert 'class="balance long"' in balance("Labels", ["a rather long class name 1", "b"], [1, 2])
    assert 'class="balance"' in balance("Labels", ["neg", "pos"], [1, 2])


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.9), (1e-6, 1e3), (2.0, 2.0), (1.0, 1.0), (0.021, 0.034)])
def test_log_ticks_cover_the_range(low, high):
    ticks = log_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert ticks == sorted(set(ticks))
    assert len(ticks) >= 2


def test_thinning_keeps_spikes():
    points = [(float(i), 1.0) for i in range(10_000)]
    points[5_432] = (5_432.0, 99.0)
    kept = thinned(points)
    assert (5_432.0, 99.0) in kept
    assert len(kept) <= 700
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_smoothing_neither_bends_a_constant_nor_lags_behind_a_slope():
    constant = smoothed([(float(i), 2.0) for i in range(50)])
    assert all(y == pytest.approx(2.0) for _, y in constant)
    slope = smoothed([(float(i), 3.0 * i) for i in range(400)])
    assert slope[200][1] == pytest.approx(600.0, abs=1.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.21, "3.2 s"), (48.4, "48 s"), (59.7, "1 min 00 s"), (222, "3 min 42 s"), (7500, "2 h 05 min"), (math.nan, "–")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
