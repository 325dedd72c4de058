"""One process, two and four give the same losses and the same weights, and go on from each other's checkpoints.

Real processes on the CPU, with gloo, in fp32 and without dropout. The data end in an epoch's last step of one document,
so that with several ranks some have none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny_runs as tiny

STEPS = 10
SAVED = 5
TOLERANCE = 1e-5  # fp32; sums in another order

COMMON = (
    f"step_scheduler: {{max_steps: {STEPS}, log_every_steps: 1, global_batch_size: 8, val_every_steps: 5, "
    f"ckpt_every_steps: {SAVED}}}\n"
    "checkpoint: {keep_last: 10}\n"
    "dataloader: {batch_size: 2}\n"
    "optimizer: {lr: 1e-3, weight_decay: 0.01}\n"
    "distributed: {strategy: ddp, dp_size: none}\n"
)

# 41 rows and 8 in a step: the sixth step has one.
RUNS = {
    "classes": (
        "model: {bert}\ntask: text-classification\ndataset: {{path: {rows}}}\nvalidation_dataset: {{path: {test}}}\n"
        "loss_fn: {{class_weights: [1.0, 3.0]}}\n"
    ),
    "padded": (
        "model: {bert}\ntask: text-classification\ndataset: {{path: {rows}}}\nvalidation_dataset: {{path: {test}}}\n"
        "packed_sequence: {{enabled: false}}\n"
    ),
    "words": "model: {llama}\ntask: causal-lm\ndataset: {{path: {texts}}}\nvalidation_dataset: {{path: {texts}}}\n",
    "bins": (
        "model: {llama}\ntask: causal-lm\ndataset: {{path: {texts}}}\nvalidation_dataset: {{path: {texts}}}\n"
        "packed_sequence: {{packed_sequence_size: 48}}\n"
    ),
}
PER_BIN = ("batch_size: 2", "batch_size: 1")
DROPOUT = (
    "model: {dropping}\ntask: text-classification\ndataset: {{path: {rows}}}\nvalidation_dataset: {{path: {test}}}\n"
)


def start(ranks: int, folder: Path, names: list[str]) -> str:
    """The runs, on so many ranks, and what they said."""
    command = [sys.executable, str(Path(__file__).with_name("train_many.py"))]
    if ranks > 1:
        options = ["--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, "-m", "torch.distributed.run", *options, command[1]]
    files = [str(folder / f"{name}.yaml") for name in names]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AUTOMODEL_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [*command, str(folder / f"on{ranks}"), *files], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The same runs on one, two and four ranks: on1/…, on2/…, on4/…."""
    folder = tmp_path_factory.mktemp("runs")
    places = {
        "bert": tiny.make_model_folder(folder / "bert"),
        "dropping": tiny.make_model_folder(folder / "dropping", dropout=0.2),
        "llama": tiny.make_model_folder(folder / "llama", "llama"),
        "rows": tiny.write_jsonl(folder / "rows.jsonl", tiny.reviews(41)),
        "test": tiny.write_jsonl(folder / "test.jsonl", tiny.reviews(11, seed=1)),
        "texts": tiny.write_jsonl(folder / "texts.jsonl", [{"text": row["text"]} for row in tiny.reviews(41, seed=2)]),
    }
    for name, text in RUNS.items():
        common = COMMON.replace(*PER_BIN) if name == "bins" else COMMON
        (folder / f"{name}.yaml").write_text(text.format(**places) + common)
    (folder / "dropout.yaml").write_text(DROPOUT.format(**places) + COMMON)
    start(1, folder, list(RUNS))
    start(2, folder, [*RUNS, "dropout"])
    start(4, folder, list(RUNS))
    return folder


def saved(folder: Path, step: int, group: str = "model") -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "steps" / f"step-{step:08d}" / f"{group}.safetensors")


def assert_same(expected: Path, found: Path, since: int = 0) -> None:
    for split in ("train", "validation"):
        wanted, got = tiny.losses(expected, split), tiny.losses(found, split)
        assert wanted.keys() == got.keys()
        assert all(abs(wanted[step] - got[step]) < TOLERANCE for step in wanted if step > since), (wanted, got)
    for group in ("model", "optimizer"):
        wanted, got = saved(expected, STEPS, group), saved(found, STEPS, group)
        assert wanted.keys() == got.keys()
        for name in wanted:
            torch.testing.assert_close(got[name], wanted[name], atol=TOLERANCE, rtol=TOLERANCE)


def cut_short(runs: Path, folder: Path, ranks: int, names: list[str]) -> None:
    """What two ranks leave that die after step 5, for so many ranks to go on with."""
    for name in names:
        shutil.copy(runs / f"{name}.yaml", folder)
        left = shutil.copytree(runs / "on2" / name, folder / f"on{ranks}" / name)
        shutil.rmtree(left / "run" / "steps" / f"step-{STEPS:08d}")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", RUNS)
def test_ranks_train_what_one_process_trains(runs, name, ranks):
    assert len(tiny.losses(runs / "on1" / name)) == STEPS
    assert_same(runs / "on1" / name, runs / f"on{ranks}" / name)


@pytest.mark.slow
def test_what_is_saved_on_two_ranks_goes_on_on_one(runs, tmp_path):
    """Two ranks died after step 5; one process takes over."""
    cut_short(runs, tmp_path, 1, list(RUNS))
    said = start(1, tmp_path, list(RUNS))
    assert said.count("The checkpoint comes from 2 ranks, and 1 goes on with it") == len(RUNS)
    for name in RUNS:
        assert_same(runs / "on1" / name, tmp_path / "on1" / name, since=SAVED)


@pytest.mark.slow
def test_two_ranks_go_on_with_their_own_dropout(runs, tmp_path):
    """Each rank draws its own; both take up where they were, to the last digit."""
    cut_short(runs, tmp_path, 2, ["dropout"])
    start(2, tmp_path, ["dropout"])
    assert tiny.losses(tmp_path / "on2" / "dropout") == tiny.losses(runs / "on2" / "dropout")
    states = saved(runs / "on2" / "dropout", STEPS, "rng")
    assert not torch.equal(states["torch"], states["torch.1"])


@pytest.mark.slow
def test_the_folder_of_several_ranks_is_that_of_one(runs):
    """One model, one report, one metrics file, written once."""

    def listed(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    for name in RUNS:
        assert listed(runs / "on4" / name) == listed(runs / "on1" / name)
        lines = (runs / "on4" / name / "run" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == len((runs / "on1" / name / "run" / "metrics.jsonl").read_text().splitlines())
