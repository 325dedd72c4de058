"""report.html of a comparison: complete, self-contained, and safe whatever the names are."""

import re

from automodel.benchmark.report import render_comparison, write_comparison_report


def test_report_is_self_contained(document, tmp_path):
    page = write_comparison_report(tmp_path, document).read_text(encoding="utf-8")
    assert "Content-Security-Policy" in page
    assert "default-src 'none'" in page
    assert not re.findall(r'(?:src|href)\s*=\s*["\']', page)
    assert not re.findall(r"url\(|@import|https?://", page)


def test_report_shows_every_part(document, stock, ours):
    document["ladder"] = [{**stock, "rung": "bottom"}, {**ours, "rung": "top"}]
    page = render_comparison(document)
    for heading in ("Results", "Loss", "Step time", "Time and throughput", "Memory", "One optimization at a time"):
        assert f"<h2>{heading}</h2>" in page
    assert page.count('<path class="line side-') == 8  # two curves, linear and logarithmic, of two sides
    assert "a note" in page
    assert "4.00<small>x the speed</small>" in page


def test_report_escapes_what_it_is_given(document):
    evil = "<script>alert(1)</script>"
    document["command"] = evil
    document["notes"] = [evil]
    document["system_info"]["gpu_name"] = evil
    for side in document["sides"].values():
        side["method"] = evil
        side["setup"] = '"><img onerror=x>'
    document["results"]["baseline"]["method"] = evil
    page = render_comparison(document)
    assert evil not in page
    assert "<img" not in page
    assert page.count("<script>") == 1


def test_more_memory_is_not_called_less(document):
    document["results"]["improvements"]["memory_reduction_percent"] = -12.0
    assert "12<small>% more</small>" in render_comparison(document)


def test_the_page_says_in_which_order_rows_were_read(document):
    document["job"]["shuffle"] = True
    page = render_comparison(document)
    assert "shuffled, the same on every side<" in page
    assert "similar lengths" not in page
    document["agreement"][0] = {**document["agreement"][0], "same_data_order": False}
    page = render_comparison(document)
    assert "shuffled, the same on every side, but for HF Trainer: rows of similar lengths together" in page
    assert "the losses and metrics of a short run differ by chance" in page


def test_the_page_names_precision_attention_threads_and_the_machine(document):
    document["sides"]["hf-trainer"] |= {"precision": "bf16", "attention": "eager", "threads": 1}
    page = render_comparison(document)
    for fact in (
        "HF Trainer bf16, automodel fp32",
        "HF Trainer eager, automodel sdpa",
        "HF Trainer 1, automodel 2",
        "A Processor (family 26, model 2), avx512_bf16, 2 cores",
    ):
        assert fact in page
