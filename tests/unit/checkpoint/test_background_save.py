"""A checkpoint that is written while training goes on holds what was there when it began."""

import threading

import pytest
import torch

from automodel.checkpoint import store as store_module
from automodel.checkpoint.store import CheckpointStore


@pytest.fixture
def slow(monkeypatch):
    """Writing waits until the test allows it."""
    allowed = threading.Event()
    write = store_module.write_tensors

    def held_back(path, tensors):
        assert allowed.wait(30)
        return write(path, tensors)

    monkeypatch.setattr(store_module, "write_tensors", held_back)
    return allowed


def test_later_changes_do_not_reach_it(tmp_path, slow):
    store = CheckpointStore(tmp_path)
    weight, state = torch.ones(3), {"losses": [1.0]}
    store.begin(1, {"model": {"w": weight}}, state)
    weight.zero_()
    state["losses"].append(2.0)
    assert not list(tmp_path.glob("step-*"))
    slow.set()
    checkpoint = store.at(1)  # waits
    checkpoint.verify()
    assert torch.equal(checkpoint.tensors("model")["w"], torch.ones(3))
    assert checkpoint.state() == {"losses": [1.0]}


def test_the_next_one_waits_for_it_and_old_ones_are_dropped(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    for step in (1, 2, 3):
        store.begin(step, {"model": {"w": torch.full((2,), float(step))}}, {})
    store.wait()
    assert [c.step for c in store.complete()] == [3]
    assert (tmp_path / "LATEST").read_text() == "step-00000003\n"
    assert not list(tmp_path.glob(".unfinished-*"))


def test_a_failure_is_raised_once_and_leaves_the_older_one(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(1, {"model": {"w": torch.ones(2)}}, {})

    def full(path, tensors):
        raise OSError(28, "No space left on device")

    write = store_module.write_tensors
    monkeypatch.setattr(store_module, "write_tensors", full)
    store.begin(2, {"model": {"w": torch.ones(2)}}, {})
    assert [c.step for c in store.complete()] == [1]  # asking what is there does not raise
    with pytest.raises(OSError, match="No space left"):
        store.wait()
    assert not list(tmp_path.glob(".unfinished-*"))
    monkeypatch.setattr(store_module, "write_tensors", write)
    store.begin(3, {"model": {"w": torch.ones(2)}}, {})
    assert [c.step for c in store.complete()] == [1, 3]


def test_without_room_for_a_copy_it_is_written_at_once(tmp_path, monkeypatch):
    class Memory:
        available = 4

    monkeypatch.setattr(store_module.psutil, "virtual_memory", lambda: Memory)
    monkeypatch.setattr(store_module, "_copied", lambda tensors: pytest.fail("copied"))
    store = CheckpointStore(tmp_path)
    store.begin(1, {"model": {"w": torch.ones(8)}}, {})
    assert (tmp_path / "step-00000001" / "manifest.json").exists()
