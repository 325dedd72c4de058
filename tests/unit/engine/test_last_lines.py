"""What a run says at its end: what it cost, what it reached, and commands that work as they stand."""

import io
import re
import shlex
import time

import pytest
from click.testing import CliRunner
from rich.console import Console

import tiny_runs as tiny
from automodel.cli.main import load_verb
from automodel.engine import loop
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config


def run(path, overrides=(), **options):
    out = io.StringIO()
    done = finetune(load_run_config([path], list(overrides)), console=Console(file=out, width=500), **options)
    return done, out.getvalue().splitlines()


def command_behind(lines: list[str], words: str) -> list[str]:
    (found,) = [line.removeprefix(f"[INFO] {words}").strip() for line in lines if line.startswith(f"[INFO] {words}")]
    program, *rest = shlex.split(found)
    assert program == "automodel", found
    return rest


def type_in(arguments: list[str]):
    """What typing the command does, in this process."""
    verb, *rest = arguments
    return CliRunner().invoke(load_verb(verb), rest)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return tiny.write_run(tmp_path, rows=16, text="step_scheduler: {num_epochs: 2, log_every_steps: 1}\n")


def test_a_finished_run_tells_time_best_and_commands_that_work(path, tmp_path):
    _, lines = run(path)
    text = "\n".join(lines)
    assert re.search(r"\[INFO\] Best evaluation: Loss 0\.\d+, after step \d of 4", text)
    assert re.search(r"\[INFO\] Took \d+\.\d s, \d+\.\d s of it training; peak host memory \d+\.\dGB", text)
    assert f"[INFO] Saved the model to {tmp_path / 'out'}" in lines
    answer = type_in(command_behind(lines, "Predict:"))
    assert answer.exit_code == 0, answer.output
    assert re.search(r"LABEL_\d|\b[01]\b", answer.stdout)
    longer = type_in(command_behind(lines, "Train on:"))
    assert longer.exit_code == 0, longer.output
    assert "[Step 6/6] Loss" in longer.stdout


def test_a_stopped_run_tells_how_to_continue(path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(loop.StopRequest, "agreed", lambda *_: "SIGTERM")
        done, lines = run(path)
    assert done.exit_code == 130
    assert any("Took" in line for line in lines)
    more = type_in(command_behind(lines, "Continue with:"))
    assert more.exit_code == 0, more.output
    assert "Resuming after step 1" in more.stdout


def test_an_adapter_is_called_one(path, tmp_path):
    _, lines = run(path, ["peft.dim=2"])
    assert f"[INFO] Saved the adapter to {tmp_path / 'out'}" in lines
    written = type_in(["checkpoint", "convert", str(tmp_path / "out"), "--out", str(tmp_path / "converted")])
    assert f"Wrote the adapter of step 4 to {tmp_path / 'converted'}" in written.stdout
    _, lines = run(path, ["peft.dim=2", "checkpoint.enabled=false", f"checkpoint.checkpoint_dir={tmp_path / 'none'}"])
    assert "[INFO] No adapter was saved: checkpoint.enabled is false" in lines


def test_a_run_that_saves_nothing_offers_no_commands(path):
    _, lines = run(path, ["checkpoint.enabled=false"])
    assert not any("Predict:" in line or "--resume" in line for line in lines)


def test_its_start_is_told_part_by_part(path):
    _, lines = run(path)
    assert lines[0] == "[INFO] Reading the model and the data …"
    assert "[INFO] Loading the weights …" in lines


def test_the_page_is_there_while_it_trains(path, tmp_path, monkeypatch):
    seen = []
    validate = loop._validate

    def look(run):
        until = time.monotonic() + 20
        while not (tmp_path / "out/run/report.html").exists() and time.monotonic() < until:
            time.sleep(0.01)
        seen.append((tmp_path / "out/run/report.html").read_text())
        return validate(run)

    monkeypatch.setattr(loop, "_validate", look)
    run(path)
    assert "running, as of" in seen[0]
    assert ">finished<" in (tmp_path / "out/run/report.html").read_text()


@pytest.mark.parametrize(
    ("ranks", "here", "said"),
    [
        (1, 1, "Launching job locally on 1 device"),
        (4, 4, "Launching job locally on 4 ranks"),
        (16, 8, "Launching job on 16 ranks, 8 of them on this machine"),
    ],
)
def test_only_what_runs_on_this_machine_is_called_local(monkeypatch, ranks, here, said):
    from types import SimpleNamespace as Made

    from automodel.engine import run as running

    monkeypatch.setattr(running, "is_trained", lambda run: False)
    plan = Made(path="packed", ranks=ranks, total_steps=9)
    train = Made(stats=Made(skipped=0), from_cache=False)
    prepared = Made(plan=plan, train=train, validation=None, ranks=Made(world=Made(local_size=here)))
    run = Made(prepared=prepared, step=Made(), state=Made(step=0), checkpoints=None)
    assert said in running._opening_lines(run)
