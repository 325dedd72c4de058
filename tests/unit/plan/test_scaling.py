"""Predictions: the page is what the model says, and the model agrees with what was measured and published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from automodel.distributed.layout import Layout
from automodel.plan.memory import FITS
from automodel.plan.scaling import H200, predict
from automodel.plan.scaling_table import EAGER, LLAMA_1B, LLAMA_8B, LLAMA_70B, MEASURED, efficiency, markdown, rows

ROOT = Path(__file__).parents[3]


def test_the_page_has_the_table():
    assert markdown() in (ROOT / "docs" / "scaling.md").read_text()


def test_compute_is_the_measured_one():
    measured = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())
    row = next(r for r in measured if (r["workload"], r["provider"]) == ("llama1b-4k", "automodel"))
    assert row["tokens_per_s"] == pytest.approx(MEASURED, rel=0.15)
    alone = predict(LLAMA_1B, Layout(), efficiency(MEASURED))
    assert alone.tokens_per_s_gpu == pytest.approx(MEASURED)
    assert alone.beside_s == alone.between_s == 0


def test_published_figures():
    """torchtitan's 8B in FP8 on H200, 10.9k tok/s a GPU: bf16 is 10 to 40 % slower. NeMo's LoRA: 402 TFLOP/s."""
    eight = Layout(shards=8, fsdp=True)
    assert 0.6 < predict(LLAMA_8B, eight, efficiency(EAGER)).tokens_per_s_gpu / 10_900 < 0.9
    assert 0.85 < predict(LLAMA_8B, eight, efficiency(MEASURED)).tokens_per_s_gpu / 10_900 < 1.0
    lora = LLAMA_8B.operations() - 2 * LLAMA_8B.parameters  # frozen weights have no gradients
    assert 12_473 * lora == pytest.approx(402e12, rel=0.12)


def test_traffic_by_hand():
    """8B in eight shards: (2 · 2 + 4) bytes · 7/8 over 450 GB/s · 80 %, and 96 rings of seven hops."""
    found = predict(LLAMA_8B, Layout(shards=8, fsdp=True), 0.5)
    assert found.beside_s == pytest.approx(8 * LLAMA_8B.parameters * 7 / 8 / 360e9 + 96 * 7 * 2e-6)
    replicas = predict(LLAMA_8B, Layout(4, 8, fsdp=True), 0.5)
    more = 2 * 4 * LLAMA_8B.parameters / 8 * 3 / 4 / 40e9 + 64 * 3 * 8e-6
    assert replicas.beside_s - found.beside_s == pytest.approx(more)


def test_what_follows():
    enough = efficiency(MEASURED)
    wide, nested = (predict(LLAMA_8B, x, enough) for x in (Layout(shards=1024, fsdp=True), Layout(128, 8, fsdp=True)))
    assert nested.tokens_per_s > wide.tokens_per_s
    cut, shards = (
        predict(LLAMA_70B, x, enough) for x in (Layout(shards=8, tp=8, fsdp=True), Layout(shards=64, fsdp=True))
    )
    assert shards.tokens_per_s > cut.tokens_per_s
    assert cut.memory_gib < shards.memory_gib
    assert predict(LLAMA_70B, Layout(shards=8, fsdp=True), enough).memory_gib > FITS * H200.memory_gib
    assert all(eager.memory_gib < FITS * H200.memory_gib for _, _, eager, _ in rows())
    context = predict(replace(LLAMA_8B, tokens=65_536, context=65_536), Layout(shards=1, cp=8, fsdp=True), enough)
    assert context.between_s > 0
    twice = predict(replace(LLAMA_8B, accumulation=2), Layout(shards=8, fsdp=True), enough)
    assert twice.memory_gib > predict(LLAMA_8B, Layout(shards=8, fsdp=True), enough).memory_gib
