"""A resumed run has one clock: every sink's `time` and the summary's wall time count what it took before."""

import json

import tiny_runs as tiny
from automodel.engine.run import finetune
from automodel.metrics.jsonl import read_metrics
from automodel.metrics.trackers import Trackers
from automodel.plan.check import load_run_config


def test_time_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    path = tiny.write_run(tmp_path, rows=16, text="step_scheduler: {num_epochs: 4, log_every_steps: 1}\n")
    finetune(load_run_config([path], ["step_scheduler.num_epochs=2"]))
    metrics = tmp_path / "out" / "run" / "metrics.jsonl"
    lines = [line | {"time": line["time"] + 1000.0} for line in read_metrics(metrics)]
    # A step that no checkpoint has is taken a second time; the first time was paid for, too.
    lines.append({"step": 5, "split": "train", "time": 1200.0, "loss": 0.5, "memory_gib": 777.0})
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told: list[float] = []
    log = Trackers.log
    monkeypatch.setattr(Trackers, "log", lambda self, *a: (told.append(a[1]["time"]), log(self, *a))[1])
    again = finetune(load_run_config([path]), resume=True)
    assert again.summary["steps"] == 8
    assert told, "the resumed part logs"
    assert all(1200.0 < time < 1300.0 for time in told)
    assert all(1000.0 < line["time"] < 1300.0 for line in read_metrics(metrics))
    assert [line["step"] for line in read_metrics(metrics) if line["split"] == "train"] == [*range(1, 9)]
    assert 1200.0 < again.summary["wall_s"] < 1300.0
    assert again.summary["peak_memory_gib"] == 777.0
    assert again.summary["train_s"] < again.summary["wall_s"]
