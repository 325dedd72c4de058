"""TensorBoard, Weights & Biases and MLflow at the end of a real run: what was logged can be read back."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import tiny_runs as tiny

SINKS = """
step_scheduler: {max_steps: 6, log_every_steps: 2, val_every_steps: 3}
tensorboard: {}
wandb: {project: tiny, name: first, tags: [a, b]}
mlflow: {experiment_name: tiny, run_name: first, tags: {team: blue}}
"""


def needs(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, str]:
    """One run of the real command into all three."""
    needs("tensorboard", "wandb", "mlflow")
    folder = tmp_path_factory.mktemp("sinks")
    tiny.write_run(folder, text=SINKS)
    result = tiny.automodel(
        "finetune", "llm", "-c", folder / "run.yaml", AUTOMODEL_CACHE=str(folder / "cache"), HOME=str(folder)
    )
    assert result.stderr == ""
    return folder / "out" / "run", result.stdout


def test_the_plan_names_the_sinks(recorded):
    sinks = "sinks wandb, mlflow, tensorboard (besides run/metrics.jsonl and run/report.html)"
    assert sinks in " ".join(recorded[1].split())


def test_tensorboard_has_the_same_numbers(recorded):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = recorded
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    logged = {event.step: event.value for event in events.Scalars("train/loss")}
    assert logged == pytest.approx(tiny.losses(run.parent))
    assert [event.step for event in events.Scalars("validation/accuracy")] == [3, 6]


def test_wandb_recorded_offline(recorded):
    """Its file is records of JSON texts in a binary log; wandb has no public reader for it."""
    run, said = recorded
    assert "wandb: recording offline: no login found" in said
    (path,) = run.glob("wandb/offline-run-*/run-*.wandb")
    assert f"wandb sync {path.parent}" in said, "said as a person would have to type it"
    content = path.read_bytes()
    for text in ("tiny", "first", "train/loss", "validation/accuracy"):
        assert text.encode() in content
    for loss in tiny.losses(run.parent).values():
        assert json.dumps(loss)[:12].encode() in content


def test_mlflow_keeps_a_finished_run_in_the_run_folder(recorded, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run, said = recorded
    assert "mlflow: recording in experiment 'tiny'" in said
    client = MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("tiny")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert (found.info.run_name, found.data.tags["team"]) == ("first", "blue")
    assert found.data.params["optimizer.lr"] == "0.001"
    history = {metric.step: metric.value for metric in client.get_metric_history(found.info.run_id, "train/loss")}
    assert history == pytest.approx(tiny.losses(run.parent))


@pytest.mark.parametrize("package", ["wandb", "mlflow", "tensorboard"])
def test_a_missing_package_is_said_before_training_and_costs_no_earlier_run(package, tmp_path, monkeypatch):
    from rich.console import Console

    from automodel.config.errors import UserError
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny.write_run(tmp_path, text="step_scheduler: {max_steps: 1}\n")
    quiet = Console(file=(tmp_path / "said").open("w"))
    finetune(load_run_config([tmp_path / "run.yaml"]), console=quiet)
    before = sorted(p.relative_to(tmp_path) for p in (tmp_path / "out").rglob("*"))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else real(name, *more))
    section = {
        "wandb": "wandb.project=x",
        "mlflow": "mlflow.experiment_name=x",
        "tensorboard": "tensorboard.enabled=true",
    }
    with pytest.raises(UserError) as refused:
        finetune(load_run_config([tmp_path / "run.yaml"], [section[package]]), overwrite=True, console=quiet)
    assert str(refused.value) == (
        f"{package} is configured but not installed: pip install 'automodel-finetune[{package}]' "
        f"or remove the {package}: section"
    )
    assert sorted(p.relative_to(tmp_path) for p in (tmp_path / "out").rglob("*")) == before
