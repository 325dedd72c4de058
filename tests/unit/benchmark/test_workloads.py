"""The named workloads: the stated lengths, something to learn, and a config that loads."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "workloads.py"


@pytest.fixture(scope="module")
def workloads():
    spec = importlib.util.spec_from_file_location("workloads", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["workloads"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_distilbert_b8_is_the_measured_workload(workloads, tmp_path):
    from automodel.plan.check import load_run_config

    path = workloads.make("distilbert-b8", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    lengths = np.array([len(row["input_ids"]) for row in rows])
    assert len(rows) == 1000
    assert round(lengths.mean()) == 241
    assert (lengths.min(), lengths.max()) == (int(lengths.clip(16).min()), 512)
    planted = {(row["label"], row["input_ids"][1]) for row in rows}
    assert planted == {(0, workloads.PLANTED_ID), (1, workloads.PLANTED_ID + 1)}
    assert max(max(row["input_ids"]) for row in rows) < 30_522
    cfg = load_run_config([path])
    assert cfg.model.target.endswith("AutoModelForSequenceClassification.from_config")
    assert cfg.dataloader.batch_size == 8
    assert cfg.step_scheduler.max_steps == 125


def test_modernbert_rows_reach_two_thousand_tokens_and_avoid_its_special_ones(workloads, tmp_path):
    workloads.make("modernbert-base-b16", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    lengths = [len(row["input_ids"]) for row in rows]
    assert min(lengths) >= 64
    assert max(lengths) == 2048
    special = json.loads((tmp_path / "model" / "config.json").read_text())["pad_token_id"]
    assert all(special not in row["input_ids"] for row in rows[:50])


def test_a_workload_trains_here_too(workloads, tmp_path, monkeypatch):
    """The folder goes through the data room and the model room; only the steps are missing."""
    from automodel.engine.prepare import prepare_run
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "tokens"))
    prepared = prepare_run(load_run_config([workloads.make("distilbert-b8", tmp_path)]))
    assert prepared.plan.path == "packed"
    assert prepared.plan.max_length == 512
    assert 66e6 < prepared.plan.parameters < 68e6
    assert prepared.train.stats.truncated == 0


def test_chat_cpu_is_the_chat_quickstart_without_checkpoints(workloads, tmp_path, monkeypatch):
    """The quickstart's own recipe and conversations; only the number of steps and the checkpoints are changed."""
    from automodel.cli import quickstart_chat
    from automodel.cli.demo import smollm2
    from automodel.plan.check import load_run_config

    monkeypatch.setattr(smollm2, "smollm2_folder", lambda: tmp_path / "smollm2")
    path = workloads.make("chat-cpu", tmp_path / "made", 12)
    recipe, held_out = quickstart_chat.write_recipe(
        tmp_path / "made", tmp_path / "smollm2", quickstart_chat.FULL_MINUTES, None
    )
    measured, usual = load_run_config([path]), load_run_config([recipe])
    steps = dataclasses.replace(usual.step_scheduler, max_steps=12, num_epochs=None)
    checkpoint = dataclasses.replace(usual.checkpoint, enabled=False)
    assert measured == dataclasses.replace(usual, step_scheduler=steps, checkpoint=checkpoint)
    conversations = [json.loads(line) for line in Path(measured.dataset.path).read_text().splitlines()]
    assert len(conversations) == 84
    assert conversations[0]["messages"][-1]["role"] == "assistant"
    assert Path(measured.validation_dataset.path) == held_out
    whole = usual.step_scheduler.num_epochs * -(-84 // usual.dataloader.batch_size)
    assert whole == workloads.CHAT_STEPS


@pytest.mark.parametrize("name", ["llama1b-32k", "llama1b-32k-bf16"])
def test_long_documents_fill_a_step_each(workloads, tmp_path, name):
    from automodel.plan.check import load_run_config

    work = workloads.WORKLOADS[name]
    assert (work.batch, work.shortest, work.longest, work.learned) == (1, 32_768, 32_768, 1.0)
    (tmp_path / "run.yaml").write_text("model: x\ndataset: y\ntask: causal-lm\n")
    cfg = load_run_config([tmp_path / "run.yaml"], list(work.settings))
    assert cfg.packed_sequence.packed_sequence_size == work.longest
    assert cfg.training_optimizations.gradient_checkpointing is None  # the plan decides
    row = tmp_path / "rows.jsonl"
    workloads.write_rows(row, 1, work, type("Config", (), {"vocab_size": 128_256}), np.random.default_rng(0))
    assert len(json.loads(row.read_text())["input_ids"]) == 32_768
