"""How a run ends, and what it leaves: early stops, best weights, retention, divergence, refusals, signals.

Most runs are in this process; what concerns signals and the command itself goes through a real process.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiny_runs as tiny
from automodel.config.errors import UserError

EVERY_TWO = "step_scheduler: {num_epochs: 4, log_every_steps: 1, val_every_steps: 2, ckpt_every_steps: 2}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a model, data and run.yaml; 6 steps an epoch."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny.write_run(tmp_path, text=EVERY_TWO)
    return tmp_path


def finetune(folder: Path, *overrides: str, **how) -> tuple[dict, str]:
    """The summary and everything that was printed."""
    from rich.console import Console

    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    said = io.StringIO()
    done = finetune(load_run_config([folder / "run.yaml"], list(overrides)), console=Console(file=said), **how)
    return done.summary, said.getvalue()


def steps_kept(folder: Path) -> list[int]:
    return sorted(int(p.name.split("-")[1]) for p in (folder / "out" / "run" / "steps").glob("step-*"))


def flip_validation(folder: Path) -> None:
    """Held-out labels that contradict the training data: the more is learned, the worse it looks."""
    rows = [{"text": row["text"], "label": 1 - row["label"]} for row in tiny.reviews(16, seed=1)]
    tiny.write_jsonl(folder / "test.jsonl", rows)


def held_out_loss(model_folder: Path, rows: list[dict]) -> float:
    """The mean loss that stock transformers finds, one row at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(model_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    with torch.no_grad():
        losses = [
            model(**tokenizer(row["text"], return_tensors="pt"), labels=torch.tensor([row["label"]])).loss.item()
            for row in rows
        ]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("place", ["prepare_or_step_aside", "build"])
def test_ctrl_c_before_training_says_what_it_cost(folder, monkeypatch, place):
    from rich.console import Console

    from automodel.engine import run
    from automodel.plan.check import load_run_config

    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, place, stopped)
    said = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run.finetune(load_run_config([folder / "run.yaml"]), console=Console(file=said))
    end = "Stopped before training began: nothing is lost, and nothing that was there is changed."
    assert " ".join(said.getvalue().split()).endswith(end)


def ctrl_c(monkeypatch, capsys, place: str, *command: object) -> tuple[str, str]:
    """What the command prints where Ctrl-C comes at this place."""
    from automodel.cli.main import main

    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, stopped)
    monkeypatch.setattr(sys, "argv", ["automodel", *map(str, command)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    said = capsys.readouterr()
    return " ".join(said.out.split()), said.err


@pytest.mark.parametrize("command", [("finetune", "llm", "-c", "run.yaml"), ("plan", "-c", "run.yaml")])
@pytest.mark.parametrize("place", ["plan.check.load_run_config", "models.lean_imports.import_transformers"])
def test_ctrl_c_while_a_command_starts_is_answered_in_one_line(folder, monkeypatch, capsys, command, place):
    monkeypatch.chdir(folder)
    said, answer = ctrl_c(monkeypatch, capsys, f"automodel.{place}", *command)
    assert said in ("", "[INFO] Importing torch and transformers …")  # what the run was at
    assert answer == "Stopped; nothing was changed.\n"


@pytest.mark.parametrize(
    "command", [("evaluate", "r"), ("predict", "r", "hello"), ("generate", "r", "--prompt", "hello")]
)
def test_ctrl_c_while_a_model_is_used_is_answered_in_one_line(monkeypatch, capsys, command):
    place = "automodel.models.lean_imports.import_transformers"
    assert ctrl_c(monkeypatch, capsys, place, *command) == ("", "Stopped; nothing was changed.\n")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("prepare_or_step_aside", "nothing that was there is changed."),
        ("refuse_what_it_reads", "nothing was changed.\n"),
        ("_write_start", "Stopped."),
        ("train", "no checkpoint was saved yet."),
    ],
)
def test_ctrl_c_is_answered_once(folder, monkeypatch, capsys, place, said):
    command = ("finetune", "llm", "-c", folder / "run.yaml")
    out, error = ctrl_c(monkeypatch, capsys, f"automodel.engine.run.{place}", *command)
    assert (out + error).count("Stopped") == 1
    assert (out + error).endswith(said)


def test_early_stopping_ends_a_run_that_no_longer_improves(folder):
    flip_validation(folder)
    summary, said = finetune(
        folder, "early_stopping.patience=2", "optimizer.lr=3e-3", "step_scheduler.log_every_steps=5"
    )
    assert summary["status"] == "stopped early"
    assert summary["steps"] % 5, "the last steps have a line of their own"
    assert max(tiny.losses(folder / "out")) == summary["steps"]
    assert summary["steps"] == summary["best"]["step"] + 2 * 2
    assert summary["steps"] < 24
    assert f"Stopped early after step {summary['steps']}: loss did not improve in 2 evaluations" in said
    assert (folder / "out" / "model.safetensors").exists(), "a run that stopped early is a finished run"


def test_min_delta_decides_when_patience_ends_and_not_which_weights_are_the_best(folder):
    """As with Trainer's callback: small gains end a run, and the last of them is what is exported."""
    summary, said = finetune(folder, "early_stopping={patience: 6, min_delta: 10}", "optimizer.lr=1e-2")
    validation = tiny.losses(folder / "out", "validation")
    assert (summary["status"], summary["steps"]) == ("stopped early", 2 + 6 * 2)
    assert "loss did not improve by more than 10 in 6 evaluations" in said
    assert (summary["best"]["step"], summary["exported_step"]) == (14, 14)
    assert validation[14] == min(validation.values()) < validation[2] - 0.3
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    assert held_out_loss(folder / "out", rows) == pytest.approx(validation[14], abs=1e-5)


def test_the_best_weights_are_exported_not_the_last(folder):
    flip_validation(folder)
    summary, said = finetune(folder, "optimizer.lr=3e-3")
    best, validation = summary["best"]["step"], tiny.losses(folder / "out", "validation")
    assert best < summary["steps"]
    assert best == min(validation, key=validation.__getitem__)
    assert summary["exported_step"] == best
    assert f"Exporting step {best}, the best by loss" in said
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    found = held_out_loss(folder / "out", rows)
    assert found == pytest.approx(validation[best], abs=1e-5)
    assert found == pytest.approx(summary["validation"]["loss"], abs=1e-5)
    assert found < validation[summary["steps"]] - 0.01


def test_keep_best_false_exports_the_last(folder):
    flip_validation(folder)
    summary, _ = finetune(folder, "optimizer.lr=3e-3", "checkpoint.keep_best=false")
    assert summary["exported_step"] == summary["steps"] == 24
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    assert held_out_loss(folder / "out", rows) == pytest.approx(tiny.losses(folder / "out", "validation")[24], abs=1e-5)


def test_another_metric_can_decide(folder):
    summary, _ = finetune(folder, "checkpoint.best_metric=accuracy", "optimizer.lr=3e-3")
    assert summary["best"]["metric"] == "accuracy"
    lines = [json.loads(line) for line in (folder / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    best = max(line["accuracy"] for line in lines if line["split"] == "validation")
    assert summary["best"]["value"] == best == summary["validation"]["accuracy"]
    with pytest.raises(UserError, match="'acuracy' is not measured for this task. Choose from loss, accuracy"):
        finetune(folder, "checkpoint.best_metric=acuracy", overwrite=True)


def test_only_the_last_and_the_best_checkpoints_are_kept(folder):
    flip_validation(folder)
    summary, _ = finetune(folder, "optimizer.lr=3e-3", "checkpoint.keep_last=1")
    assert steps_kept(folder) == [summary["best"]["step"], 24]


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_checkpoint(folder, monkeypatch):
    """Steps 1 to 5 are sane; then the rate explodes. Nothing broken may push out the checkpoint of step 4."""
    from automodel.optim.schedule import Schedule

    sane = Schedule.lr_at
    monkeypatch.setattr(Schedule, "lr_at", lambda self, step, peak: 1e38 if step >= 5 else sane(self, step, peak))
    with pytest.raises(UserError) as stopped:
        finetune(folder, "step_scheduler.log_every_steps=50", "checkpoint.keep_last=1")
    assert stopped.value.exit_code == 1
    message = str(stopped.value)
    assert "at step" in message
    assert "Try a lower optimizer.lr (now 1.0e-3) or a warm-up (lr_scheduler.warmup_ratio: 0.1). " in message
    assert "The checkpoint of step 4 is kept." in message
    assert steps_kept(folder)[-1] == 4
    assert not (folder / "out" / "model.safetensors").exists()
    assert "report.html" in os.listdir(folder / "out" / "run")
    monkeypatch.undo()
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
    summary, said = finetune(folder, "checkpoint.keep_last=1", resume=True)
    assert "Resuming after step 4" in said
    assert (summary["status"], summary["steps"]) == ("finished", 24)


def test_an_absurd_learning_rate_says_what_to_try(folder):
    largest = "optimizer.lr=100", "optimizer.weight_decay=100"  # weights grow ten thousandfold at each step
    with pytest.raises(UserError, match="lower optimizer.lr .*warm-up .*No checkpoint was saved before it"):
        finetune(folder, *largest, "step_scheduler.ckpt_every_steps=20", "step_scheduler.val_every_steps=20")


def test_without_checkpoints_nothing_is_saved_and_earlier_runs_are_put_aside(folder):
    for _ in range(2):
        _, said = finetune(folder, "checkpoint.enabled=false", "step_scheduler.max_steps=2")
        assert "No model was saved: checkpoint.enabled is false" in said
    assert sorted(os.listdir(folder / "out")) == ["run", "run.1"]
    assert not (folder / "out" / "run" / "steps").exists()
    assert "no checkpoint and no model is saved" in (folder / "out" / "run" / "plan.json").read_text()


def test_another_run_is_refused_then_replaced(folder):
    finetune(folder, "step_scheduler.max_steps=2")
    (folder / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="already holds a run. Continue it with --resume, replace it with --overwrite"):
        finetune(folder)
    with pytest.raises(UserError, match="give one of them"):
        finetune(folder, resume=True, overwrite=True)
    before = (folder / "out" / "model.safetensors").read_bytes()
    (folder / "damaged").mkdir()
    for file in (folder / "model").iterdir():
        (folder / "damaged" / file.name).write_bytes(
            file.read_bytes()[: 900 if file.suffix == ".safetensors" else None]
        )
    with pytest.raises(UserError, match="the weights of .* are damaged"):
        finetune(folder, f"model={folder / 'damaged'}", overwrite=True)
    assert (folder / "out" / "model.safetensors").read_bytes() == before, "a wrong command costs nothing"
    summary, _ = finetune(folder, "step_scheduler.max_steps=4", overwrite=True)
    assert summary["steps"] == 4
    assert (folder / "out" / "notes.txt").read_text() == "mine"


def test_a_run_that_was_killed_before_its_export_is_finished_by_resume(folder, monkeypatch):
    from automodel.engine import run as engine

    def killed(*_):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "save_hf_folder", killed)
        with pytest.raises(RuntimeError, match="killed"):
            finetune(folder)
    assert not (folder / "out" / "model.safetensors").exists()
    summary, said = finetune(folder, resume=True)
    assert "All 24 steps were done before; only the export is missing" in said
    assert (summary["status"], summary["steps"]) == ("finished", 24)
    assert summary["tokens_per_s"] > 0
    assert (folder / "out" / "model.safetensors").exists()
    with pytest.raises(UserError, match="already finished its 24 steps"):
        finetune(folder, resume=True)


def test_damaged_records_do_not_keep_a_run_from_going_on(folder):
    """An empty plan.json was a traceback and an empty config.yaml a list of nonsense, beside whole checkpoints."""
    finetune(folder, "step_scheduler.num_epochs=1", "lr_scheduler=constant")
    run = folder / "out" / "run"
    before = (run / "config.yaml").read_text()
    for name in ("plan.json", "summary.json", "exported.json", "config.yaml"):
        (run / name).write_text("")
    summary, said = finetune(folder, "step_scheduler.num_epochs=2", "lr_scheduler=constant", resume=True)
    assert "config.yaml is missing or damaged; what it said is known from a checkpoint." in said.replace("\n", " ")
    assert "Resuming after step 6" in said
    assert list(tiny.losses(folder / "out")) == list(range(1, summary["steps"] + 1)) == list(range(1, 13))
    assert (run / "config.yaml").read_text() == before.replace("num_epochs: 1", "num_epochs: 2")


def test_a_finished_run_is_trained_further(folder):
    finetune(folder, "step_scheduler.num_epochs=1", "lr_scheduler=constant")
    summary, _ = finetune(folder, "step_scheduler.num_epochs=2", "lr_scheduler=constant", resume=True)
    assert summary["steps"] == 12
    assert list(tiny.losses(folder / "out")) == list(range(1, 13))


@pytest.mark.parametrize("place", ["/proc/somewhere/out", "/dev/null/out"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_loaded(folder, place):
    with pytest.raises(UserError, match="checkpoint.checkpoint_dir: "):
        finetune(folder, f"checkpoint.checkpoint_dir={place}")


def test_a_dry_run_writes_nothing_but_the_token_cache(folder):
    result = tiny.automodel("finetune", "llm", "-c", folder / "run.yaml", "--dry-run")
    assert "steps        24  (4 epochs of 6)" in result.stdout
    assert sorted(os.listdir(folder)) == ["cache", "model", "run.yaml", "test.jsonl", "train.jsonl"]


def test_the_second_start_takes_the_tokens_from_the_cache(folder):
    _, first = finetune(folder, "step_scheduler.max_steps=1")
    assert "taken from the cache" not in first
    stored = {p: p.stat().st_mtime_ns for p in (folder / "cache").rglob("*.npy")}
    assert stored
    _, second = finetune(folder, "step_scheduler.max_steps=1", overwrite=True)
    assert "Tokenised data taken from the cache" in second
    assert {p: p.stat().st_mtime_ns for p in (folder / "cache").rglob("*.npy")} == stored
    tiny.write_jsonl(folder / "train.jsonl", tiny.reviews(40, seed=7))
    _, third = finetune(folder, "step_scheduler.max_steps=1", overwrite=True)
    assert "taken from the cache" not in third, "other data"


def test_relative_paths_work_from_any_folder(folder, monkeypatch):
    """The config may lie anywhere; data, model and run folder are relative to where the command is typed."""
    project = folder / "project"
    (project / "configs").mkdir(parents=True)
    (project / "data").mkdir()
    (folder / "train.jsonl").rename(project / "data" / "train.jsonl")
    (folder / "model").rename(project / "base")
    (project / "configs" / "run.yaml").write_text("model: base\ntask: text-classification\ndataset: data/train.jsonl\n")
    monkeypatch.chdir(project)
    from rich.console import Console

    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    cfg = load_run_config(["configs/run.yaml"], ["step_scheduler.max_steps=2"])
    done = finetune(cfg, console=Console(file=io.StringIO()))
    assert done.folder == Path("checkpoints")
    assert (project / "checkpoints" / "model.safetensors").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_the_model_is_written_is_waited_out(folder, monkeypatch, capfd, number):
    """It ended the process there, and the checkpoint of the last step was lost with it."""
    from automodel.engine import run as engine

    write, heard = engine.save_hf_folder, []

    def asked_to_stop(*given):
        os.kill(os.getpid(), number)
        write(*given)

    monkeypatch.setattr(engine, "save_hf_folder", asked_to_stop)
    before = signal.signal(number, lambda *_: heard.append(number))
    try:
        summary, said = finetune(folder, "step_scheduler.max_steps=2")
        assert not heard, "the process would have ended"
        os.kill(os.getpid(), number)
        assert heard == [number], "the handler of before is back"
    finally:
        signal.signal(number, before)
    assert summary["status"] == "finished"
    assert f"{number.name} came at the end: nothing was left to train, and everything is written" in said
    assert f"{number.name}: training is over, and its results are being written." in capfd.readouterr().err
    assert steps_kept(folder) == [2]
    assert (folder / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once_and_the_run_stays_resumable(folder):
    """Large batches make a step long enough to be interrupted inside; the checkpoint of step 1 is what remains."""
    tiny.write_jsonl(folder / "train.jsonl", tiny.reviews(1200, longest=100))
    slow = ("dataloader.batch_size=400", "step_scheduler.ckpt_every_steps=1", "step_scheduler.max_steps=40")
    command = [sys.executable, "-m", "automodel", "finetune", "llm", "-c", str(folder / "run.yaml"), *slow]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("[Step 2/"):
            break
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors, errors
    assert re.search(r"in the middle of the work; --resume continues after step \d+|Stopped by SIGINT", output), output
    steps = sorted((folder / "out" / "run" / "steps").glob("step-*"))
    assert steps, "at least one complete checkpoint"
    result = tiny.automodel(
        "finetune", "llm", "-c", folder / "run.yaml", "--resume", *slow[:2],
        f"step_scheduler.max_steps={int(steps[-1].name.split('-')[1]) + 1}",
    )  # fmt: skip
    assert "Resuming after step" in result.stdout
    assert (folder / "out" / "model.safetensors").exists()
