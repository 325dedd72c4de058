"""Sharded layouts train what one process trains, and go on from each other's checkpoints."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from many_runs import SAVED, SHARDED, STEPS, TOLERANCE, assert_same, start


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in SHARDED.items() for name in names])
def test_a_layout_trains_what_one_process_trains(runs, ranks, name):
    one, many = runs / "on1" / name.split("-")[0], runs / f"on{ranks}" / name
    assert_same(one, many)
    file = "adapter_model.safetensors" if name.startswith("adapter") else "model.safetensors"
    wanted, got = load_file(one / file), load_file(many / file)
    assert wanted.keys() == got.keys()
    for key in wanted:
        torch.testing.assert_close(got[key], wanted[key], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
def test_every_rank_writes_its_own_part(runs):
    folder = runs / "on4" / "words-tpcp" / "run" / "steps" / f"step-{STEPS:08d}"
    sizes = [path.stat().st_size for path in folder.glob("model-rank-*")]
    whole = sum(p.stat().st_size for p in (runs / "on1" / "words" / "run" / "steps" / folder.name).glob("model*"))
    assert len(sizes) == 4
    assert max(sizes) < 0.5 * whole  # a quarter, and headers


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_four_ranks_save_and_others_go_on(runs, tmp_path, ranks):
    """Four sharded ranks died after step 5; one process, or two ranks of a layout of their own, take over."""
    chain = {1: [("words-tpcp", "words"), ("bins-tp", "bins")], 2: [("words-tpcp", "words-fsdp")]}[ranks]
    for before, after in chain:
        shutil.copy(runs / f"{after}.yaml", tmp_path)
        left = shutil.copytree(runs / "on4" / before, tmp_path / f"on{ranks}" / after)
        shutil.rmtree(left / "run" / "steps" / f"step-{STEPS:08d}")
    start(ranks, tmp_path, [after for _, after in chain])
    for before, after in chain:
        assert_same(runs / "on1" / before.split("-")[0], tmp_path / f"on{ranks}" / after, since=SAVED)
