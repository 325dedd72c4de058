"""Sharded layouts train what one process trains, and go on from each other's checkpoints."""

from __future__ import annotations

import json
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
    assert json.loads((many / "run" / "summary.json").read_text())["loaded"]["streamed"], "each rank read its own rows"
    file = "adapter_model.safetensors" if name.startswith(("adapter", "qlora", "dora")) else "model.safetensors"
    wanted, got = load_file(one / file), load_file(many / file)
    assert wanted.keys() == got.keys()
    for key in wanted:
        torch.testing.assert_close(got[key], wanted[key], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapter-fsdp", "qlora-fsdp"])
def test_an_adapter_that_four_ranks_saved_is_loaded_by_one(runs, name):
    """From its folder, beside the base as it is on the disk: the logits of the adapter that one process trained."""
    from automodel.engine.saved import open_saved

    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        one, many, base = (
            open_saved(runs / place).load("cpu")(input_ids=ids).logits
            for place in (f"on1/{name.split('-')[0]}", f"on4/{name}", "llama")
        )
    assert not torch.allclose(one, base, atol=1e-3)
    torch.testing.assert_close(many, one, atol=TOLERANCE, rtol=TOLERANCE)


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
    chain = {
        1: [("words-tpcp", "words"), ("bins-tp", "bins"), ("adapter-fsdp", "adapter"), ("qlora-fsdp", "qlora")],
        2: [("words-tpcp", "words-fsdp")],
    }[ranks]
    for before, after in chain:
        shutil.copy(runs / f"{after}.yaml", tmp_path)
        left = shutil.copytree(runs / "on4" / before, tmp_path / f"on{ranks}" / after)
        shutil.rmtree(left / "run" / "steps" / f"step-{STEPS:08d}")
    start(ranks, tmp_path, [after for _, after in chain])
    for before, after in chain:
        assert_same(runs / "on1" / before.split("-")[0], tmp_path / f"on{ranks}" / after, since=SAVED)
