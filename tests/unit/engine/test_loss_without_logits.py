"""Runs of a language model whose loss makes the logits itself: the same losses, metrics and weights as with logits."""

import json

import pytest
import torch
from safetensors.torch import load_file

import tiny_runs as tiny
from automodel.engine.run import finetune
from automodel.kernels import logits_memory
from automodel.plan.check import load_run_config


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))

    def train(name: str, *settings: str, tied: bool = True, text: str = ""):
        folder = tmp_path / name
        folder.mkdir()
        path = tiny.write_run(folder, kind="llama", text=text, tie_word_embeddings=tied)
        always = ("task=causal-lm", "step_scheduler.max_steps=6", "step_scheduler.log_every_steps=1")
        finetune(load_run_config([path], [*always, *settings]))
        out = folder / "out"
        metrics = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
        plan = json.loads((out / "run" / "plan.json").read_text())
        return tiny.losses(out), metrics, plan, load_file(out / "model.safetensors")

    return train


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_run_learns_and_evaluates_the_same(run, monkeypatch, tied):
    monkeypatch.setitem(logits_memory.BUFFER_BYTES, "cpu", 1)  # 128 rows at a time: several chunks
    batch = "dataloader.batch_size=16"
    fused, fused_metrics, plan, weights = run("fused", batch, tied=tied)
    stored, stored_metrics, other_plan, other_weights = run("stored", batch, "loss_fn.fused=false", tied=tied)
    assert plan["fused_loss"]
    assert not other_plan["fused_loss"]
    assert fused == pytest.approx(stored, rel=1e-5)
    assert fused[6] < fused[1]
    ours = [m for m in fused_metrics if m["split"] == "validation"]
    theirs = [m for m in stored_metrics if m["split"] == "validation"]
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs):
        for name in ("loss", "perplexity", "accuracy"):
            assert mine[name] == pytest.approx(other[name], rel=1e-5), name
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, other_weights[name], rtol=1e-3, atol=1e-5, msg=name)


def test_accumulation_is_exact(run):
    whole, *_ = run("whole", "dataloader.batch_size=8")
    parts, *_ = run("parts", "dataloader.batch_size=2", "step_scheduler.grad_acc_steps=4")
    assert parts == pytest.approx(whole, rel=1e-5)


def test_z_loss_raises_the_training_loss_and_not_the_evaluations(run):
    plain, plain_metrics, *_ = run("plain", "optimizer.lr=1e-9")
    penalised, metrics, *_ = run("z", "optimizer.lr=1e-9", "loss_fn.z_loss=0.01")
    assert penalised[1] > plain[1] + 0.01
    last = [[m["loss"] for m in ms if m["split"] == "validation"][-1] for ms in (plain_metrics, metrics)]
    assert last[0] == pytest.approx(last[1], rel=1e-5)


@pytest.mark.parametrize("name", ["masked_ce.MaskedCrossEntropy", "linear_ce.FusedLinearCrossEntropy"])
def test_nemos_names_of_the_loss_are_understood(run, name):
    named, _, plan, _ = run("named", text=f"loss_fn: {{_target_: nemo_automodel.components.loss.{name}}}\n")
    plain, *_ = run("plain")
    assert plan["fused_loss"]
    assert named == plain
