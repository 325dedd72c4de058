"""What a comparison does when a side fails, and what it says of a run it was asked to measure."""

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from automodel.benchmark import verb
from automodel.benchmark.job import drawn_keys, warmup_steps
from automodel.benchmark.sides import AUTOMODEL, TRAINERS, Side
from automodel.benchmark.verb import Wishes
from automodel.config.errors import UserError


def lost(name: str) -> dict[str, Any]:
    return {
        "provider": name, "method": name, "status": "failed", "exit_code": 1, "error": "out of memory", "log": "x.log",
    }  # fmt: skip


@pytest.fixture
def compare(job, tmp_path, monkeypatch):
    """A comparison whose sides' measurements are given; returns it and what was printed."""

    def run(measured: dict[str, dict], rungs: tuple[str, ...] = (), **wishes: Any):
        def run_sides(_, sides, *__):
            return {side.name: measured[side.name] for side in sides}

        monkeypatch.setattr(verb, "run_sides", run_sides)
        monkeypatch.setattr(verb, "ladder_sides", lambda _: ([Side(name, name) for name in rungs], []))
        plan = SimpleNamespace(total_steps=20, micro_batch_size=8, grad_acc_steps=1)
        prepared = SimpleNamespace(prepared=SimpleNamespace(plan=plan), settings=job, notes=())
        opponents = [TRAINERS[name] for name in measured if name in TRAINERS]
        console = Console(width=140, record=True)
        asked = Wishes(output=tmp_path, ladder=bool(rungs), **wishes)
        return verb._compare(prepared, opponents, asked, console), console.export_text()  # ty: ignore[invalid-argument-type]

    return run


def test_what_was_measured_is_kept_where_the_baseline_fails(compare, stock, ours):
    """The stock Trainer, fp32 and padded, is the first to run out of memory; the others took their time too."""
    tuned = {**stock, "provider": "hf-trainer-tuned", "method": "HF Trainer, tuned"}
    found, said = compare({"hf-trainer": lost("hf-trainer"), "hf-trainer-tuned": tuned, AUTOMODEL.name: ours})
    assert found.exit_code == 1
    assert found.document["results"]["baseline"]["provider"] == "hf-trainer-tuned"
    assert found.results.exists()
    assert found.report.exists()
    assert "out of memory" in said
    assert any("hf-trainer failed" in note and "HF Trainer, tuned" in note for note in found.document["notes"])


def test_without_ours_or_any_opponent_there_is_nothing_to_compare(compare, stock, ours):
    for sides in (
        {"hf-trainer": stock, AUTOMODEL.name: lost("automodel")},
        {"hf-trainer": lost("hf-trainer"), AUTOMODEL.name: ours},
    ):
        found, said = compare(sides)
        assert found.exit_code == 1
        assert found.document is None
        assert "out of memory" in said


def test_a_rung_that_fails_is_an_error_too(compare, stock, ours):
    sides = {"hf-trainer": stock, AUTOMODEL.name: ours, "automodel-0": lost("automodel-0")}
    found, said = compare(sides, rungs=("hf-trainer", "automodel-0", AUTOMODEL.name))
    assert found.exit_code == 1
    assert found.document["ladder"][1]["status"] == "failed"
    assert "automodel-0 failed:\nout of memory" in said


def tried(*attempts: tuple[str, str, float]) -> list[dict[str, Any]]:
    return [{"precision": p, "attention": a, "ms": ms} for p, a, ms in attempts]


def test_what_a_tuned_side_was_tried_with_is_said(compare, stock, ours):
    chosen = {"tried": tried(("bf16", "eager", 279.0), ("bf16", "sdpa", 377.0)), "precision": "bf16"}
    tuned = {**stock, **chosen, "provider": "hf-trainer-tuned", "method": "HF Trainer, tuned"}
    found, _ = compare({"hf-trainer-tuned": tuned, AUTOMODEL.name: ours})
    (note,) = found.document["notes"]
    assert note.startswith("HF Trainer, tuned uses what was fastest here")
    assert note.endswith("forward and backward of a batch: bf16 eager 279.0 ms, bf16 sdpa 377.0 ms")


def test_a_precision_that_the_config_asks_for_binds_the_peers_and_the_comparison_says_so(compare, job, stock, ours):
    job |= {"asked_precision": "training_optimizations.precision", "precision": "fp32"}
    tuned = {**stock, "tried": tried(("fp32", "sdpa", 1.0)), "provider": "hf-trainer-tuned"}
    _, said = compare({"hf-trainer-tuned": tuned, AUTOMODEL.name: ours})
    assert "training_optimizations.precision asks for fp32, so the tuned Trainer computes in fp32" in said


def test_a_warm_up_that_was_asked_for_is_kept():
    assert warmup_steps(7, 10, 20) == 7
    assert warmup_steps(None, 10, 20) == 5  # the default: at most a quarter of the run
    assert warmup_steps(0, 10, 20) == 0
    with pytest.raises(UserError, match=r"--warmup 20.*20 steps"):
        warmup_steps(20, 10, 20)


def test_dropout_of_a_head_that_is_not_there_draws_nothing():
    from transformers import BertConfig, DistilBertConfig, MixtralConfig

    none: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    assert drawn_keys(DistilBertConfig(**none)) == []  # qa_dropout is 0.1
    assert drawn_keys(DistilBertConfig(**none | {"seq_classif_dropout": 0.2})) == ["model.seq_classif_dropout"]
    assert "model.hidden_dropout_prob" in drawn_keys(BertConfig())
    assert drawn_keys(MixtralConfig(router_jitter_noise=0.1)) == ["model.router_jitter_noise"]
