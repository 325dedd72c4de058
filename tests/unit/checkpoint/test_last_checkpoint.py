"""The last checkpoint of a finished run may be with the system for a while; nothing on the disk goes for it."""

from pathlib import Path

import pytest
import torch

from automodel.checkpoint import catalog
from automodel.checkpoint import store as store_module
from automodel.checkpoint.store import CheckpointStore
from watched_disk import note_flushes

WEIGHTS = "model.safetensors"


@pytest.fixture
def events(monkeypatch):
    """What was brought to the disk, and what was removed, in order."""
    noted: list[str] = []
    retire = catalog.retire

    def remove(folder):
        noted.append(f"away with {folder.name}")
        retire(folder)

    note_flushes(monkeypatch, lambda path: noted.append(path.name))
    monkeypatch.setattr(catalog, "retire", remove)
    return noted


def some(value: float = 1.0) -> dict:
    return {"model": {"w": torch.full((3000,), value)}}


def filled(folder: Path, *steps: int, **options) -> CheckpointStore:
    store = CheckpointStore(folder, **options)
    for step in steps:
        store.save(step, some(step), {})
    return store


def end(store: CheckpointStore, step: int, **options) -> None:
    with store:
        store.begin(step, some(step), {"step": step}, last=True, at_once=False, **options)


def test_the_system_has_it_and_it_is_complete(tmp_path, events):
    end(CheckpointStore(tmp_path), 2)
    assert WEIGHTS not in events
    assert "manifest.json" in events
    checkpoint = CheckpointStore(tmp_path).latest()[0]
    checkpoint.verify()
    assert checkpoint.state() == {"step": 2}
    assert torch.equal(checkpoint.tensors("model")["w"], torch.full((3000,), 2.0))
    assert (tmp_path / "LATEST").read_text() == "step-00000002\n"


@pytest.mark.parametrize(
    ("before", "keep_last", "protect"), [((), 1, ()), ((1,), 2, ()), ((1,), 1, (1,)), ((1, 2), 2, (1,))]
)
def test_where_all_that_is_there_stays_the_disk_is_not_waited_for(tmp_path, events, before, keep_last, protect):
    store = filled(tmp_path, *before, keep_last=keep_last)
    del events[:]
    end(store, 3, protect=protect)
    assert WEIGHTS not in events
    assert [c.step for c in store.complete()] == [*before, 3]


@pytest.mark.parametrize(("before", "keep_last", "gone"), [((1,), 1, 1), ((1, 2), 2, 1), ((3,), 2, 3)])
def test_what_takes_anothers_place_is_on_the_disk_before_that_goes(tmp_path, events, before, keep_last, gone):
    store = filled(tmp_path, *before, keep_last=keep_last)
    del events[:]
    end(store, 3)
    assert events.index(WEIGHTS) < events.index(f"away with step-{gone:08d}")
    assert sorted({*before, 3} - ({gone} - {3})) == [c.step for c in store.complete()]


def test_a_damaged_one_that_would_go_is_a_place_too(tmp_path, events):
    store = filled(tmp_path, 1, 2, keep_last=1)  # 2 alone
    (tmp_path / "step-00000002" / WEIGHTS).write_bytes(b"short")
    del events[:]
    end(store, 3)
    assert WEIGHTS in events


def test_async_save_false_waits_for_the_disk(tmp_path, events):
    end(CheckpointStore(tmp_path, background=False), 2)
    assert WEIGHTS in events


@pytest.mark.parametrize("waited", [True, False])
def test_an_error_at_the_end_waits_for_the_disk(tmp_path, events, waited):
    """The model could not be written, mostly: this is all that there is."""

    def fail():
        with store:
            store.begin(2, some(), {}, last=True, at_once=False)
            if waited:
                store.wait()
            raise OSError(28, "No space left on device")

    store = CheckpointStore(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        fail()
    assert events.count(WEIGHTS) == 1
    store.at(2).verify()


def test_a_sharded_one_is_waited_for(tmp_path, events, monkeypatch):
    monkeypatch.setattr(store_module, "is_sharded", lambda tensor: True)
    end(CheckpointStore(tmp_path), 2)
    assert "model-rank-00000-of-00001.safetensors" in events


def test_one_that_is_in_its_place_when_the_disk_is_full_is_brought_there(tmp_path, events, monkeypatch):
    """It would be called kept, so it has to be."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(catalog, "point_latest", full)
    with pytest.raises(store_module.SaveFailedError, match="No space left"):
        end(CheckpointStore(tmp_path), 2)
    assert WEIGHTS in events
    assert [c.step for c in catalog.seem_whole(tmp_path)] == [2]


def test_a_disk_that_does_not_take_it_is_told_beside_the_error(tmp_path, monkeypatch):
    def broken(path):
        raise OSError(5, "Input/output error")

    def fail():
        with store:
            store.begin(2, some(), {}, last=True, at_once=False)
            raise ValueError("the end")

    store, said = CheckpointStore(tmp_path), []
    store.warn = said.append
    monkeypatch.setattr(catalog, "bring_to_disk", broken)
    with pytest.raises(ValueError, match="the end"):
        fail()
    assert said == ["The checkpoint of step 2 may not be on the disk: Input/output error."]
    store.bring_to_disk()
    assert len(said) == 1, "once"


def test_a_folder_that_cannot_be_looked_at_is_waited_for(tmp_path, monkeypatch):
    def stale(*_, **__):
        raise OSError(116, "Stale file handle")

    store = CheckpointStore(tmp_path)
    assert not store._takes_a_place(2, set())
    monkeypatch.setattr(catalog, "too_old", stale)
    assert store._takes_a_place(2, set())


def test_what_a_power_cut_left_of_it_is_noticed_and_the_one_before_is_there(tmp_path):
    store = filled(tmp_path, 1)
    end(store, 2)
    weights = tmp_path / "step-00000002" / WEIGHTS
    whole = weights.read_bytes()
    for left in (b"", whole[:5000], whole[:5000] + bytes(len(whole) - 5000)):
        weights.write_bytes(left)
        found, notes = CheckpointStore(tmp_path).latest()
        assert found.step == 1
        assert str(weights) in notes[0]
        found.verify()
