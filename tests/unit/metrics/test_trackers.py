"""Sinks, each written for real and read back with its own tool."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from automodel.config.errors import UserError
from automodel.metrics.config import MlflowConfig, TensorboardConfig, WandbConfig
from automodel.metrics.jsonl import EarlierParts, earlier_parts
from automodel.metrics.trackers import JsonlTracker, Trackers, build_trackers, read_metrics

CONFIG = {"model": {"name": "tiny"}, "optimizer": {"lr": 1e-5}}
PLAN = {"device": "cpu", "decisions": [{"name": "precision", "value": "fp32", "reason": "cpu"}]}
SUMMARY = {"status": "finished", "steps": 3, "train_loss": 0.5, "validation": {"accuracy": 0.9}, "best": None}


def record(tracker, run_dir, steps=range(1, 4), summary=SUMMARY):
    tracker.start(run_dir, CONFIG, PLAN)
    for step in steps:
        tracker.log(step, {"epoch": step / 10, "loss": 1.0 / step, "lr": 1e-5}, "train")
    tracker.log(steps[-1], {"loss": 0.4, "accuracy": 0.9}, "validation")
    tracker.finish(summary)


# metrics.jsonl


def test_lines_have_the_agreed_keys_and_time_goes_forward(tmp_path):
    record(build_trackers(None, None, None, tmp_path), tmp_path)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["split"]) for line in lines] == [
        (1, "train"),
        (2, "train"),
        (3, "train"),
        (3, "validation"),
    ]
    assert list(lines[0]) == ["step", "epoch", "split", "time", "loss", "lr"]
    assert lines[2]["loss"] == pytest.approx(1 / 3)
    assert 0 <= lines[0]["time"] <= lines[-1]["time"] < 60


def test_nan_and_infinity_are_valid_json_and_come_back(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.start(tmp_path, {}, {})
    tracker.log(1, {"loss": math.nan, "grad_norm": math.inf, "low": -math.inf}, "train")
    tracker.finish({})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(line["loss"])
    assert (line["grad_norm"], line["low"]) == (math.inf, -math.inf)


def test_resume_removes_later_lines_and_continues_the_clock(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": s, "split": "train", "time": 100.0 * s, "loss": "NaN" if s == 1 else 1.0} for s in range(1, 6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "spl')
    record(JsonlTracker(path, resume_step=3), tmp_path, steps=[4, 5])
    found = read_metrics(path)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 5]
    assert math.isnan(found[0]["loss"])
    assert 300.0 <= found[3]["time"] < 360.0
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_time_given_by_the_caller_is_the_runs(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "split": "train", "time": 50.0}\n')
    assert earlier_parts(path, None) == EarlierParts(50.0, 0.0)
    tracker = JsonlTracker(path, resume_step=1)
    tracker.start(tmp_path, {}, {})
    tracker.log(2, {"loss": 1.0, "time": 57.0, "epoch": 0.5}, "train")
    assert read_metrics(path)[-1] == {"step": 2, "epoch": 0.5, "split": "train", "time": 57.0, "loss": 1.0}


def test_a_new_run_starts_a_new_file(tmp_path):
    for _ in range(2):
        record(JsonlTracker(tmp_path / "metrics.jsonl"), tmp_path)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


def test_damage_before_the_last_line_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "split": "train"}\n{"st\n{"step": 3, "split": "train"}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a metrics line"):
        read_metrics(path)
    with pytest.raises(UserError, match="not a metrics line"):
        build_trackers(None, None, None, tmp_path, resume_step=1).start(tmp_path, {}, {})


def test_no_file_is_no_metrics(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_killed_process_loses_no_finished_line(tmp_path):
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from automodel.metrics.jsonl import JsonlTracker\n"
        "tracker = JsonlTracker(Path(sys.argv[1]) / 'metrics.jsonl')\n"
        "tracker.start(Path(sys.argv[1]), {}, {})\n"
        "step = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    tracker.log(step, {'loss': 0.5}, 'train')\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 200:
        pass
    process.send_signal(signal.SIGKILL)
    announced = [int(line) for line in process.stdout.read().splitlines() if line.strip()]
    process.wait()
    steps = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= max(announced[:-1], default=200)


# composite


class Breaking:
    name = "breaking"

    def __init__(self, at):
        self.at, self.calls = at, []

    def _call(self, verb):
        self.calls.append(verb)
        if verb == self.at:
            raise ConnectionError("network is down\nwith details")

    def start(self, run_dir, config, plan):
        self._call("start")

    def log(self, step, values, split):
        self._call("log")

    def finish(self, summary):
        self._call("finish")


@pytest.mark.parametrize(
    ("at", "calls"), [("start", ["start"]), ("log", ["start", "log"]), ("finish", ["start", *["log"] * 4, "finish"])]
)
def test_a_broken_sink_is_reported_once_and_the_others_go_on(tmp_path, at, calls):
    warnings = []
    broken = Breaking(at)
    trackers = Trackers([broken, JsonlTracker(tmp_path / "metrics.jsonl")], warnings.append)
    record(trackers, tmp_path)
    assert broken.calls == calls
    assert len(warnings) == 1
    assert warnings[0].startswith("breaking could not ")
    assert "network is down" in warnings[0]
    assert "\n" not in warnings[0]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


@pytest.mark.parametrize(
    ("package", "section"),
    [
        ("wandb", {"wandb": WandbConfig()}),
        ("mlflow", {"mlflow": MlflowConfig()}),
        ("tensorboard", {"tensorboard": TensorboardConfig()}),
    ],
)
def test_a_missing_package_is_found_before_training(tmp_path, monkeypatch, package, section):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    sections = {"wandb": None, "mlflow": None, "tensorboard": None} | section
    with pytest.raises(UserError) as error:
        build_trackers(**sections, run_dir=tmp_path)
    assert str(error.value) == (
        f"{package} is configured but not installed: pip install 'automodel-finetune[{package}]' "
        f"or remove the {package}: section"
    )


def test_building_without_sinks_imports_none_of_them():
    code = (
        "import sys, automodel.metrics.trackers as t; t.build_trackers(None, None, None, '.');"
        "print([m for m in ('wandb', 'mlflow', 'tensorboard', 'torch', 'sklearn') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_a_tensorboard_section_can_be_switched_off(tmp_path):
    record(build_trackers(None, None, TensorboardConfig(enabled=False), tmp_path), tmp_path)
    assert not (tmp_path / "tensorboard").exists()


# TensorBoard


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, round(event.value, 4)) for event in events.Scalars(tag)]


def test_tensorboard_events_can_be_read_back_and_resume_purges(tmp_path):
    record(build_trackers(None, None, TensorboardConfig(), tmp_path), tmp_path)
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(1, 1.0), (2, 0.5), (3, 0.3333)]
    assert scalars(tmp_path / "tensorboard", "validation/accuracy") == [(3, 0.9)]
    time.sleep(1.1)  # event files are ordered by the second in their names
    record(build_trackers(None, None, TensorboardConfig(), tmp_path, resume_step=2), tmp_path, steps=[3, 4])
    assert [step for step, _ in scalars(tmp_path / "tensorboard", "train/loss")] == [1, 2, 3, 4]


def test_tensorboard_folder_can_be_chosen(tmp_path):
    record(build_trackers(None, None, TensorboardConfig(log_dir=str(tmp_path / "tb")), tmp_path), tmp_path)
    assert scalars(tmp_path / "tb", "train/lr")[0][0] == 1


# Weights & Biases, offline


@pytest.fixture
def no_wandb_login(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    yield
    import wandb

    wandb.teardown()  # it reads the environment once a process: a test that came first decided for the others


@pytest.mark.usefixtures("no_wandb_login")
def test_wandb_without_a_login_records_offline_and_says_so(tmp_path, capfd):
    said, warned = [], []
    config = WandbConfig(project="demo", name="first", tags=("a", "b"))
    record(build_trackers(config, None, None, tmp_path, info=said.append, warn=warned.append), tmp_path)
    assert warned == []
    assert len(said) == 1
    assert said[0].startswith("wandb: recording offline: no login found (run `wandb login` or set WANDB_API_KEY)")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert said[0].endswith(f"wandb sync {folder}")
    (data,) = folder.glob("run-*.wandb")
    content, deadline = b"", time.monotonic() + 20
    while b"train_loss" not in content and time.monotonic() < deadline:  # wandb's service closes it after finish()
        content = data.read_bytes()
        time.sleep(0.02)
    for expected in (b"train/loss", b"validation/accuracy", b"demo", b"first", b"train_loss"):
        assert expected in content
    assert capfd.readouterr().out == ""  # the terminal belongs to the progress bar


@pytest.mark.usefixtures("no_wandb_login")
def test_wandb_records_the_command_line_without_its_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["automodel", "mlflow.tracking_uri=https://me:pa55word@host", "optimizer.lr=0.25"])
    record(build_trackers(WandbConfig(), None, None, tmp_path, info=lambda text: None), tmp_path)
    assert sys.argv[1] == "mlflow.tracking_uri=https://me:pa55word@host"
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    content, deadline = b"", time.monotonic() + 20
    while b"optimizer.lr=0.25" not in content and time.monotonic() < deadline:
        content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
        time.sleep(0.02)
    assert b"optimizer.lr=0.25" in content
    assert b"pa55word" not in content


@pytest.mark.usefixtures("no_wandb_login")
def test_wandb_continuation_of_an_offline_run_shares_its_group(tmp_path):
    said = []
    record(build_trackers(WandbConfig(), None, None, tmp_path, info=said.append), tmp_path)
    first = json.loads((tmp_path / "wandb.json").read_text())
    resumed = build_trackers(WandbConfig(), None, None, tmp_path, resume_step=2, info=said.append)
    record(resumed, tmp_path, steps=[3, 4])
    second = json.loads((tmp_path / "wandb.json").read_text())
    assert second["group"] == first["group"] == first["id"] != second["id"]
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2


@pytest.mark.usefixtures("no_wandb_login")
def test_wandb_mode_of_the_environment_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    said = []
    record(build_trackers(WandbConfig(mode="offline"), None, None, tmp_path, info=said.append), tmp_path)
    assert said == ["wandb: disabled by its mode; nothing is recorded"]
    assert not list(tmp_path.glob("wandb/offline-run-*"))
    monkeypatch.setenv("WANDB_MODE", "onlien")
    with pytest.raises(UserError, match="WANDB_MODE=onlien: use one of disabled, offline, online"):
        build_trackers(WandbConfig(), None, None, tmp_path)


@pytest.mark.usefixtures("no_wandb_login")
def test_wandb_falls_back_to_offline_when_the_server_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr("automodel.metrics.wandb_sink._INIT_TIMEOUT_S", 2)
    said, warned = [], []
    record(build_trackers(WandbConfig(), None, None, tmp_path, info=said.append, warn=warned.append), tmp_path)
    assert warned == []
    assert said[0].startswith("wandb: recording offline: the server could not be used (")
    assert len(list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))) == 1


# MLflow, local store


def mlflow_run(run_dir):
    from mlflow import MlflowClient

    remembered = json.loads((run_dir / "mlflow.json").read_text())
    client = MlflowClient(tracking_uri=remembered["tracking_uri"])
    return client, client.get_run(remembered["run_id"])


@pytest.fixture
def no_mlflow_environment(monkeypatch):
    """Also undoes what the sink sets."""
    for name in ("ALLOW_FILE_STORE", "TRACKING_URI", "HTTP_REQUEST_MAX_RETRIES", "HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(f"MLFLOW_{name}", "set to be restored")
        monkeypatch.delenv(f"MLFLOW_{name}")


@pytest.mark.usefixtures("no_mlflow_environment")
def test_mlflow_local_store_can_be_read_back(tmp_path):
    said, warned = [], []
    config = MlflowConfig(experiment_name="demo", run_name="first", tags={"team": "nlp"})
    run_dir = tmp_path / "a folder" / "run"
    run_dir.mkdir(parents=True)
    record(build_trackers(None, config, None, run_dir, info=said.append, warn=warned.append), run_dir)
    assert warned == []
    assert said == [f"mlflow: recording in experiment 'demo' at {(run_dir / 'mlruns').as_uri()}"]
    client, run = mlflow_run(run_dir)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert run.data.params["optimizer.lr"] == "1e-05"
    assert run.data.params["plan.device"] == "cpu"
    assert run.data.metrics["summary/validation.accuracy"] == 0.9
    assert run.data.tags["team"] == "nlp"
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"


@pytest.mark.usefixtures("no_mlflow_environment")
@pytest.mark.parametrize("status", ["diverged", "out of memory"])
def test_mlflow_is_told_of_failures(tmp_path, status):
    ended = SUMMARY | {"status": status, "train_loss": math.nan}
    record(build_trackers(None, MlflowConfig(), None, tmp_path, info=print), tmp_path, summary=ended)
    assert mlflow_run(tmp_path)[1].info.status == "FAILED"


@pytest.mark.usefixtures("no_mlflow_environment")
def test_mlflow_continues_its_run_and_marks_interruptions(tmp_path):
    interrupted = SUMMARY | {"status": "interrupted", "train_loss": math.nan}
    record(build_trackers(None, MlflowConfig(), None, tmp_path, info=print), tmp_path, summary=interrupted)
    client, first = mlflow_run(tmp_path)
    assert first.info.status == "KILLED"
    record(build_trackers(None, MlflowConfig(), None, tmp_path, resume_step=3, info=print), tmp_path, steps=[4, 5])
    client, second = mlflow_run(tmp_path)
    assert second.info.run_id == first.info.run_id
    assert second.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(second.info.run_id, "train/loss")] == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("no_mlflow_environment")
def test_an_mlflow_server_that_is_gone_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    warned = []
    config = MlflowConfig(tracking_uri="http://127.0.0.1:9")
    record(build_trackers(None, config, None, tmp_path, info=print, warn=warned.append), tmp_path)
    assert len(warned) == 1
    assert warned[0].startswith("mlflow could not start and is left out from here on; the run goes on (")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


def test_long_parameters_and_odd_names_are_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    trackers = build_trackers(None, MlflowConfig(tracking_uri=str(tmp_path / "store")), None, tmp_path, info=print)
    trackers.start(Path(tmp_path), {"a[0]": "x" * 9000} | {f"k{i}": i for i in range(150)}, {})
    trackers.finish(SUMMARY)
    _, run = mlflow_run(tmp_path)
    assert len(run.data.params["a_0_"]) == 6000
    assert run.data.params["k149"] == "149"
