"""One process, two and four give the same losses and the same weights, and go on from each other's checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import tiny_runs as tiny
from many_runs import PLAIN, PLAIN_ON_FOUR, SAVED, STEPS, assert_same, start


def cut_short(runs: Path, folder: Path, ranks: int, names: list[str]) -> None:
    """What two ranks leave that die after step 5, for so many ranks to go on with."""
    for name in names:
        shutil.copy(runs / f"{name}.yaml", folder)
        left = shutil.copytree(runs / "on2" / name, folder / f"on{ranks}" / name)
        shutil.rmtree(left / "run" / "steps" / f"step-{STEPS:08d}")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), [*((2, name) for name in PLAIN), *((4, name) for name in PLAIN_ON_FOUR)])
def test_ranks_train_what_one_process_trains(runs, ranks, name):
    assert len(tiny.losses(runs / "on1" / name)) == STEPS
    assert_same(runs / "on1" / name, runs / f"on{ranks}" / name)


@pytest.mark.slow
def test_what_is_saved_on_two_ranks_goes_on_on_one(runs, tmp_path):
    """Two ranks died after step 5; one process takes over."""
    cut_short(runs, tmp_path, 1, PLAIN)
    said = start(1, tmp_path, PLAIN)
    assert said.count("The checkpoint comes from 2 ranks, and 1 goes on with it") == len(PLAIN)
    for name in PLAIN:
        assert_same(runs / "on1" / name, tmp_path / "on1" / name, since=SAVED)


@pytest.mark.slow
def test_the_folder_of_several_ranks_is_that_of_one(runs):
    """One model, one report, one metrics file, written once."""

    def listed(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    for name in PLAIN_ON_FOUR:
        assert listed(runs / "on4" / name) == listed(runs / "on1" / name)
        lines = (runs / "on4" / name / "run" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == len((runs / "on1" / name / "run" / "metrics.jsonl").read_text().splitlines())
