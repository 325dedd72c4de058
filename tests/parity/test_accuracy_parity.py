"""MiniLM on real reviews, three seeds each: it learns as well as HF Trainer, by Trainer's own spread.

`benchmarks/accuracy.py` does the work and says what "within the spread" means. The recipe is small enough for two
cores: 480 whole reviews of at most 60 words, one epoch, dropout on, fp32; 320 other reviews are the judges.
"""

import importlib.util
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tiny_runs as tiny
from automodel.cli.demo import reviews

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accuracy.py"
HELD_OUT = 320


@pytest.fixture(scope="module")
def accuracy():
    spec = importlib.util.spec_from_file_location("accuracy", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def side(accuracy, *values: float) -> dict:
    return accuracy.summarize([{"accuracy": v, "train_loss": 0.5, "seconds": 1.0} for v in values])


def test_what_counts_as_within(accuracy):
    theirs = side(accuracy, 0.84, 0.86, 0.88)
    error = (0.86 * 0.14 / 400) ** 0.5
    verdict = accuracy.judge(side(accuracy, 0.85, 0.86, 0.84), theirs, 400)
    assert verdict["allowed"] == pytest.approx([0.84 - error, 0.88 + error])
    assert verdict["within"]
    assert verdict["learned"]
    # The mean is what counts, and a mean just outside is outside, above as well as below.
    assert not accuracy.judge(side(accuracy, 0.82, 0.82, 0.82), theirs, 400)["within"]
    assert not accuracy.judge(side(accuracy, 0.90, 0.90, 0.90), theirs, 400)["within"]
    assert accuracy.judge(side(accuracy, 0.80, 0.85, 0.90), theirs, 400)["within"]
    # Two sides that both guess agree, and that proves nothing.
    assert not accuracy.judge(side(accuracy, 0.5, 0.5), side(accuracy, 0.5, 0.5), 400)["learned"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    any(find_spec(name) is None for name in reviews.WHEELS),
    reason="the packages of the quickstart are not installed",
)
def test_three_seeds_reach_trainers_accuracy(tmp_path):
    result = tmp_path / "accuracy.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "run",
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--words",
        "60",
        "--lr",
        "2e-4",
    ]
    command += ["--samples", "480", "--held-out", str(HELD_OUT), "--seeds", "0", "1", "2", "--out", str(result)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert result.exists(), f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    found = json.loads(result.read_text())
    ours, theirs = found["sides"]["automodel"], found["sides"]["hf-trainer"]
    print(ran.stdout)
    assert len(ours["accuracies"]) == len(theirs["accuracies"]) == 3
    assert len(set(ours["accuracies"] + ours["train_losses"])) > 2, "the seeds must make a difference"
    assert theirs["mean"] >= 0.8, theirs
    assert found["within"], ran.stdout
    assert ran.returncode == 0
    # The loss over the epoch is a second witness. Seeds move it by about 0.05, so the difference of two means of three
    # is about 0.04; half the learning rate would move it by 0.1.
    losses = [sum(s["train_losses"]) / 3 for s in (ours, theirs)]
    assert abs(losses[0] - losses[1]) < 0.1, losses


def test_two_precisions_of_ours_are_two_sides(accuracy, tmp_path):
    """Each side's runs are planned in its own precision (`run_automodel` refuses another), from the same files."""
    rows = tiny.reviews(40)
    accuracy.write_rows(tmp_path / "train.jsonl", rows[:24])
    accuracy.write_rows(tmp_path / "held_out.jsonl", rows[24:])
    job = {
        "device": "cpu", "precision": "bf16", "seeds": [0, 1], "epochs": 1, "batch_size": 8, "lr": 1e-3, "dropout": 0.0,
        "work": str(tmp_path), "model": str(tiny.make_model_folder(tmp_path / "model", "bert")), "eval_batch_size": 16,
        "max_length": 64, "weight_decay": 0.01, "warmup_ratio": 0.1, "max_norm": 1.0,
    }  # fmt: skip
    for name in (accuracy.OURS, accuracy.OURS_FP32):
        accuracy.run_side(job, name)
    half, exact = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (accuracy.OURS, accuracy.OURS_FP32))
    assert [run["seed"] for run in half] == [run["seed"] for run in exact] == [0, 1]
    for a, b in zip(half, exact):
        assert a["train_loss"] != b["train_loss"], "bf16 rounds"
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=2e-2)  # bf16 has 8 bits: 4e-3 a product
