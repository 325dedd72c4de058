"""A run that was killed, stopped or restarted continues exactly."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import tiny_runs as tiny
from tiers import quick

SETTINGS = (
    "step_scheduler: {num_epochs: 4, log_every_steps: 1, val_every_steps: 9, ckpt_every_steps: 4}\n"
    "dataloader: {batch_size: 4, num_workers: 0}\n"
)


def start(folder, *more):
    """The real command, left running; its own process group so that a kill takes everything."""
    command = [sys.executable, "-m", "automodel", "finetune", "llm", "-c", str(folder / "run.yaml"), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AUTOMODEL_CACHE": str(folder / "cache")}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_for_step(process, step):
    """Reads on until the step is logged, and returns what it read; `*` is any step."""
    read = []
    for line in process.stdout:
        read.append(line)
        if line.startswith("[Step " if step == "*" else f"[Step {step}/"):
            return "".join(read)
    assert step == "*", "the process ended before the step"
    return "".join(read)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run with dropout, so that randomness has to be restored as well."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    tiny.write_run(folder, text=SETTINGS, dropout=0.1)
    tiny.automodel("finetune", "llm", "-c", folder / "run.yaml", AUTOMODEL_CACHE=str(folder / "cache"))
    return folder / "out"


@pytest.fixture
def reference(tmp_path, uninterrupted):
    """The same run, not begun yet, beside what it comes to when it is left alone."""
    tiny.write_run(tmp_path, text=SETTINGS, dropout=0.1)
    shutil.copytree(uninterrupted, tmp_path / "uninterrupted")
    return tmp_path


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def same_as_uninterrupted(folder):
    for split in ("train", "validation"):
        assert tiny.losses(folder / "out", split) == tiny.losses(folder / "uninterrupted", split)
    ours, theirs = weights(folder / "out"), weights(folder / "uninterrupted")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_kill_nine_at_ten_random_moments(reference):
    """SIGKILL ten times at random moments: loading, steps, validations, saves, export. Whenever a run comes through,
    its losses and weights are those of the run left alone; then the next starts, until ten kills are spent."""
    chance = random.Random(int.from_bytes(os.urandom(4)))
    kills = finished = 0
    while kills < 10 or not finished:
        resumable = any((reference / "out" / "run" / "steps").glob("step-*"))
        process = start(reference, "--resume" if resumable else "--overwrite")
        read = ""
        if kills < 10:
            read = wait_for_step(process, "*") if chance.random() < 0.8 else process.stdout.readline()
            time.sleep(chance.uniform(0.0, 1.2))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
        output, _ = process.communicate(timeout=200)
        if process.returncode != -signal.SIGKILL:
            # A run may be killed after its very last act; the next one then says so, perhaps before the first step.
            assert process.returncode == 0 or "already finished" in read + output, read + output
            same_as_uninterrupted(reference)
            finished += 1
            shutil.rmtree(reference / "out")


@pytest.mark.parametrize("number", quick([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_a_signal_saves_and_exits_and_the_run_continues_exactly(reference, number):
    process = start(reference)
    wait_for_step(process, 7)
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 130, output
    assert f"Stopped by {signal.Signals(number).name}" in output
    assert re.search(r"Continue with: .*finetune llm -c \S+/out/run/config.yaml --resume\n", output)
    summary = json.loads((reference / "out" / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert not (reference / "out" / "model.safetensors").exists()
    tiny.automodel(
        "finetune", "llm", "-c", reference / "run.yaml", "--resume", AUTOMODEL_CACHE=str(reference / "cache")
    )
    assert tiny.losses(reference / "out") == tiny.losses(reference / "uninterrupted")


def test_resume_refuses_another_config_and_a_finished_run(reference):
    arguments = (
        "finetune",
        "llm",
        "-c",
        reference / "run.yaml",
        f"checkpoint.checkpoint_dir={reference / 'uninterrupted'}",
    )
    cache = {"AUTOMODEL_CACHE": str(reference / "cache")}
    finished = tiny.automodel(*arguments, "--resume", check=False, **cache)
    assert finished.returncode == 2
    assert "already finished its 48 steps" in finished.stderr
    changed = tiny.automodel(*arguments, "--resume", "optimizer.lr=0.5", check=False, **cache)
    assert changed.returncode == 2
    assert changed.stderr.startswith(
        "error: --resume: the config differs from the one this run was started with.\n"
        "  optimizer.lr: was 0.001, now 0.5\n"
    )
    again = tiny.automodel(*arguments, check=False, **cache)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr


@pytest.mark.slow
def test_resume_on_changed_data_is_refused(reference):
    process = start(reference)
    wait_for_step(process, 7)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=100)
    tiny.write_jsonl(reference / "train.jsonl", tiny.reviews(40, seed=5))
    result = tiny.automodel(
        "finetune",
        "llm",
        "-c",
        reference / "run.yaml",
        "--resume",
        check=False,
        AUTOMODEL_CACHE=str(reference / "cache"),
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert "data" in result.stderr
