"""Checkpoints are complete or absent, and damage is named."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time

import pytest
import torch

from automodel.checkpoint import catalog, parts, randomness, tensor_file
from automodel.checkpoint.store import CheckpointStore, DamagedCheckpointError, SaveFailedError, last_saved


def tensors(value: float):
    return {"model": {"w": torch.full((4, 4), value)}, "optimizer": {"exp_avg/w": torch.zeros(4, 4)}}


def test_round_trip_and_latest(tmp_path):
    store = CheckpointStore(tmp_path / "steps")
    store.save(3, tensors(3.0), {"step": 3})
    checkpoint, notes = store.latest()
    assert checkpoint is not None
    assert not notes
    assert checkpoint.step == 3
    assert torch.equal(checkpoint.tensors("model")["w"], torch.full((4, 4), 3.0))
    assert checkpoint.state() == {"step": 3}
    assert (tmp_path / "steps" / "LATEST").read_text().strip() == checkpoint.folder.name


def test_retention_keeps_the_last_and_the_protected(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2, 3, 4, 5):
        store.save(step, tensors(step), {}, protect=[2] if step >= 2 else [])
    assert [c.step for c in store.complete()] == [2, 4, 5]


@pytest.mark.parametrize("how", ["no manifest", "truncated", "changed"])
def test_damaged_ones_are_not_counted_as_kept(tmp_path, how):
    """A run that went on from the one before a damaged one would keep that, and drop what it went on from."""
    for step in (1, 2, 4):
        CheckpointStore(tmp_path).save(step, tensors(step), {})
    file = tmp_path / "step-00000004" / ("manifest.json" if how == "no manifest" else "model.safetensors")
    data = file.read_bytes()
    file.unlink() if how == "no manifest" else file.write_bytes(data[:-3] + (b"?!?" if how == "changed" else b""))
    store = CheckpointStore(tmp_path)
    checkpoint, notes = store.latest()
    assert checkpoint is not None
    assert (checkpoint.step, len(notes)) == (2, 1)
    store.save(3, tensors(3), {})
    assert [c.step for c in store.complete()] == [2, 3, 4], "the damaged one is left for the run to replace"
    store.save(5, tensors(5), {})
    assert [c.step for c in store.complete()] == [3, 5], "it is over"
    store.save(6, tensors(6), {})
    (tmp_path / "step-00000006" / "model.safetensors").unlink()
    assert last_saved(store) == 5
    shutil.rmtree(tmp_path / "step-00000006")
    checkpoint, notes = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 5
    assert notes == [
        f"{tmp_path / 'step-00000006'} is missing, which LATEST names. Falling back to the checkpoint before it."
    ]


def test_tied_tensors_are_written(tmp_path):
    shared = torch.randn(6)
    store = CheckpointStore(tmp_path)
    store.save(1, {"model": {"a": shared, "b": shared[:3]}}, {})
    loaded = store.latest()[0].tensors("model")
    assert torch.equal(loaded["b"], shared[:3])


def test_a_large_group_lies_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "FILE_BYTES", 64)
    named = {f"layer.{i}": torch.randn(8) for i in range(20)} | {"table": torch.randn(100)}
    store = CheckpointStore(tmp_path)
    store.save(1, {"model": {"w": torch.ones(2)}, "optimizer": named}, {})
    kept = store.save(2, {"model": {"w": torch.ones(2)}, "optimizer": named}, {})
    files = sorted(path.name for path in kept.folder.glob("*.safetensors"))
    assert files == ["model.safetensors", *(f"optimizer-0000{i}-of-00006.safetensors" for i in range(1, 7))]
    assert set(kept.files()) == {*files, "state.json"}
    found = kept.tensors("optimizer")
    assert found.keys() == named.keys()
    assert all(torch.equal(found[name], named[name]) for name in named)
    assert all(torch.equal(kept.parts("optimizer")[name].read(), named[name]) for name in named)
    (kept.folder / files[3]).unlink()
    with pytest.raises(DamagedCheckpointError, match="5 of the 6 files of optimizer"):
        kept.tensors("optimizer")
    before, notes = store.latest()
    assert before is not None
    assert before.step == 1
    assert f"{files[3]} is missing" in notes[0]


def test_a_full_disk_ends_all_writers(tmp_path, monkeypatch):
    """The third of many files does not fit: those under way end, no other is begun, and no half of it stays."""
    monkeypatch.setattr(parts, "FILE_BYTES", 64)
    write, begun, ended = tensor_file.write_tensors, [], []

    def refuse(path, *rest):
        begun.append(path.name)
        if "00003-of" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        time.sleep(0.2 if "00001-of" in path.name else 0.05)  # the first takes longest, and is not waited for first
        done = write(path, *rest)
        ended.append(path.name)
        return done

    monkeypatch.setattr(tensor_file, "write_tensors", refuse)
    monkeypatch.setattr(tensor_file, "WRITERS", 3)
    named = {f"layer.{i}": torch.randn(8) for i in range(40)}
    store = CheckpointStore(tmp_path)
    with pytest.raises(SaveFailedError, match=r"step 1 could not be written .* No space left on device"):
        store.save(1, {"optimizer": named, "rng": {"r": torch.ones(2)}}, {})
    assert len(begun) <= 4, "the one that took the place of the third may have begun"
    assert len(ended) == len(begun) - 1
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tensor_file, "write_tensors", write)
    assert store.save(2, {"optimizer": named}, {}).tensors("optimizer").keys() == named.keys()


@pytest.mark.parametrize("version", [1, 2])
def test_checkpoints_of_older_versions_are_read(tmp_path, version):
    """Those had a file for each group; the first ones' manifest was not hashed."""
    store = CheckpointStore(tmp_path)
    path = store.save(1, tensors(1.0), {"step": 1}).folder / catalog.MANIFEST
    manifest = json.loads(path.read_text()) | {"version": version}
    del manifest["sha256"]
    path.write_text(json.dumps(manifest if version == 1 else manifest | {"sha256": catalog._seal(manifest)}))
    checkpoint, notes = store.latest()
    assert checkpoint is not None
    assert not notes
    assert torch.equal(checkpoint.tensors("model")["w"], torch.full((4, 4), 1.0))


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damage_is_named_and_the_one_before_is_used(tmp_path, damage):
    store = CheckpointStore(tmp_path)
    store.save(1, tensors(1.0), {})
    path = store.save(2, tensors(2.0), {}).folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[:-5])
    elif damage == "flip":
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    checkpoint, notes = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert "model.safetensors" in notes[0]
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors"):
        store.at(2).verify()


def test_leftovers_of_a_killed_save_are_not_checkpoints(tmp_path):
    leftover = tmp_path / ".unfinished-step-00000007-1"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    store = CheckpointStore(tmp_path)
    assert store.latest() == (None, [])
    assert not leftover.exists()


SAVER = """
import sys, torch
from pathlib import Path
from automodel.checkpoint.store import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep_last=2)
print("ready", flush=True)
for step in range(1, 100000):
    store.save(step, {"model": {"w": torch.full((400, 400), float(step))}}, {"step": step})
"""


def test_a_copy_under_another_name_is_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(1, {"model": {"w": torch.zeros(2)}}, {})
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000001.bak")
    store.save(2, {"model": {"w": torch.zeros(2)}}, {})
    assert [checkpoint.step for checkpoint in store.complete()] == [2]
    assert (tmp_path / "step-00000001.bak").is_dir(), "nobody else's files are removed"


def test_two_who_remove_one_checkpoint_do_not_disturb_each_other(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, tensors(1.0), {})
    for _ in range(2):
        catalog.retire(tmp_path / "step-00000001")
    assert store.complete() == []


def test_a_file_system_that_cannot_flush_folders_holds_checkpoints(tmp_path, monkeypatch):
    flush = os.fsync

    def only_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    CheckpointStore(tmp_path).save(1, {"model": {"w": torch.zeros(2)}}, {})
    assert CheckpointStore(tmp_path).latest()[0] is not None


@pytest.mark.slow
def test_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """SIGKILL while it does nothing but save; whatever is found must be whole and consistent."""
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        process = subprocess.Popen([sys.executable, "-c", SAVER, str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline().strip() == "ready"
        time.sleep(0.15 + 0.07 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        store = CheckpointStore(folder)
        checkpoint, notes = store.latest()
        assert not notes
        if checkpoint is not None:
            assert checkpoint.state()["step"] == checkpoint.step
            assert float(checkpoint.tensors("model")["w"][0, 0]) == checkpoint.step


def test_randomness_round_trip():
    randomness.seed_everything(5)
    torch.rand(3)
    captured, values = randomness.capture()
    values = json.loads(json.dumps(values))
    import random

    import numpy as np

    first = (torch.rand(4), random.random(), np.random.rand())
    randomness.restore(captured, values)
    second = (torch.rand(4), random.random(), np.random.rand())
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]


def test_a_checkpoint_that_was_written_is_not_said_to_have_failed(tmp_path, monkeypatch):
    """Its rename went well, and the disk refused what follows."""
    store = CheckpointStore(tmp_path)
    store.save(2, tensors(2.0), {})

    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(catalog, "point_latest", refuse)
    with pytest.raises(SaveFailedError) as told:
        store.save(6, tensors(6.0), {})
    assert "could not be changed after the checkpoint of step 6 was written: Input/output error" in str(told.value)
    assert "The checkpoint of step 6 is kept" in str(told.value)
    assert "step 6 could not be written" not in str(told.value)
