"""What measurements are turned into: improvements, agreement, the results file, the table."""

import json
import math

import pytest
from rich.console import Console

from automodel.benchmark.compare import agreement, agreement_lines, improvements, load_note, write_results
from automodel.benchmark.tables import comparison_table, ladder_table

REFERENCE_KEYS = {"timestamp", "system_info", "results"}


def printed(table) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_improvements_are_the_references(stock, ours):
    found = improvements(stock, ours)
    assert found["speedup_factor"] == pytest.approx((0.8 + 1) / (0.2 + 1))
    assert found["memory_reduction_percent"] == pytest.approx(25.0)
    assert found["cost_reduction_percent"] == pytest.approx((1 - 1 / found["speedup_factor"]) * 100)
    assert found["step_speedup"] == pytest.approx(4.0)


def test_results_have_the_reference_scripts_keys(document, tmp_path):
    written = json.loads(write_results(tmp_path, document).read_text())
    assert set(written) >= REFERENCE_KEYS
    assert set(written["system_info"]) >= {"gpu_name", "gpu_memory_total", "cpu_count", "python_version"}
    for role in ("baseline", "nemo_automodel"):
        assert set(written["results"][role]) >= {"method", "training_time", "max_gpu_memory_gb", "status"}
    assert set(written["results"]["improvements"]) >= {
        "speedup_factor",
        "memory_reduction_percent",
        "cost_reduction_percent",
    }
    assert written["results"]["baseline"]["losses"]


def test_agreement_is_step_by_step_where_the_order_is_the_same(job, stock, ours):
    ours["losses"][3] *= 1.001
    found = agreement(job, stock, ours)
    assert found["max_relative_difference"] == pytest.approx(1e-3)
    assert "same data in the same order" in agreement_lines(found, "HF Trainer")[0]


def test_agreement_with_a_side_that_groups_rows_is_by_the_end_and_says_why(job, stock, ours):
    found = agreement(job, {**stock, "same_order": False}, ours)
    assert "max_relative_difference" not in found
    lines = agreement_lines(found, "HF Trainer")
    assert "HF Trainer reads rows of similar lengths together" in lines[0]
    assert "differ by chance; --against hf-trainer-ungrouped" in lines[0]
    assert lines[1].startswith("Final training loss: 0.5150, HF Trainer 0.5150")
    assert "accuracy 0.9000 / 0.9000" in lines[2]


def test_agreement_says_why_losses_may_differ(job, stock, ours):
    drawn = {**job, "drawn": ["model.attention_dropout", "peft.dropout"]}
    line = agreement_lines(agreement(drawn, stock, {**ours, "precision": "bf16"}), "HF Trainer")[0]
    assert "random numbers of its own for model.attention_dropout, peft.dropout; 0 turns that off" in line
    assert "the precisions differ: bf16 here, fp32 there" in line


def test_differing_precisions_are_said_of_a_side_that_groups_rows_too(job, stock, ours):
    tuned = {**stock, "same_order": False, "precision": "bf16"}
    lines = agreement_lines(agreement(job, tuned, ours), "HF Trainer, tuned")
    assert "The precisions differ, too: fp32 here, bf16 there." in lines
    same = agreement_lines(agreement(job, {**tuned, "precision": "fp32"}, ours), "HF Trainer, tuned")
    assert not any("precision" in line for line in same)


def test_a_busy_machine_is_said(job, stock, ours):
    assert load_note(job, [stock, ours]) is None
    note = load_note(job, [{**stock, "other_load_percent": 48.0}, ours])
    assert "48% during HF Trainer" in note
    assert load_note({**job, "device": "cuda"}, [{**stock, "other_load_percent": 48.0}, ours]) is None


def test_table_in_the_shape_of_the_reference(stock, ours):
    text = printed(comparison_table([stock], ours))
    for row in ("Training Time", "Host Memory (peak)", "Steps/Second", "Samples/Second", "Seconds/Epoch"):
        assert row in text
    assert "1.50x faster" in text  # training time
    assert "25% reduction" in text
    assert "300% faster" in text  # steps a second
    assert "GPU Utilization" not in text


def test_table_on_a_gpu_has_its_utilization(stock, ours):
    stock |= {"memory_kind": "gpu", "gpu_utilization_percent": 65.0}
    ours |= {"memory_kind": "gpu", "gpu_utilization_percent": 85.0}
    text = printed(comparison_table([stock], ours))
    assert "GPU Memory (peak, in use)" in text
    assert "31% better" in text


def test_table_says_slower_where_it_is_slower(stock, ours):
    text = printed(comparison_table([ours], {**stock, "provider": "automodel", "method": "automodel"}))
    assert "1.50x slower" in text
    assert "75% slower" in text
    assert "33% more" in text


def test_ladder_is_cumulative(stock, ours):
    rungs = [{**stock, "rung": "HF Trainer, as it comes"}, {**ours, "rung": "+ everything"}]
    text = printed(ladder_table([*rungs, {"status": "failed", "rung": "+ luck"}]))
    assert "1.0x" in text
    assert "1.5x" in text
    assert "failed" in text


def test_losses_of_zero_do_not_divide_by_zero(job, stock, ours):
    stock["losses"], ours["losses"] = [0.0] * 20, [0.0] * 20
    assert math.isfinite(agreement(job, stock, ours)["max_relative_difference"])
