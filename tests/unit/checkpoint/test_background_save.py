"""A checkpoint that is written while training goes on holds what was there when it began."""

import threading

import pytest
import torch

from automodel.checkpoint import snapshot as snapshot_module
from automodel.checkpoint import tensor_file
from automodel.checkpoint.parts import Part
from automodel.checkpoint.snapshot import Camera
from automodel.checkpoint.store import CheckpointStore, SaveFailedError
from automodel.distributed.gpu_memory import free_bytes, share_of

GIB = 1 << 30


@pytest.fixture
def slow(monkeypatch):
    """Writing waits until the test allows it."""
    allowed = threading.Event()
    write = tensor_file.write_tensors

    def held_back(*given):
        assert allowed.wait(30)
        return write(*given)

    monkeypatch.setattr(tensor_file, "write_tensors", held_back)
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


class Disk:
    """A disk that can be full."""

    def __init__(self, monkeypatch):
        self.full, write = False, tensor_file.write_tensors

        def write_unless_full(path, *rest):
            if self.full:
                raise OSError(28, "No space left on device", str(path))
            return write(path, *rest)

        monkeypatch.setattr(tensor_file, "write_tensors", write_unless_full)


def some() -> dict:
    return {"model": {"w": torch.ones(2)}}


def test_the_next_save_says_folder_and_reason_and_the_older_one_is_kept(tmp_path, monkeypatch):
    disk, store = Disk(monkeypatch), CheckpointStore(tmp_path)
    store.save(1, some(), {})
    disk.full = True
    store.begin(2, some(), {})
    assert [c.step for c in store.complete()] == [1]  # asking what is there does not raise
    with pytest.raises(SaveFailedError) as failed:
        store.begin(3, some(), {})
    message = str(failed.value)
    assert f"the checkpoint of step 2 could not be written to {tmp_path}: No space left on device" in message
    assert "The checkpoint of step 1 is kept" in message
    assert failed.value.exit_code == 1
    assert not list(tmp_path.glob(".unfinished-*"))
    assert (tmp_path / "LATEST").read_text() == "step-00000001\n"
    disk.full = False
    store.begin(3, some(), {})  # said once
    assert [c.step for c in store.complete()] == [1, 3]


def test_on_error_continue_says_so_and_goes_on(tmp_path, monkeypatch):
    disk, store, said = Disk(monkeypatch), CheckpointStore(tmp_path, on_error="continue"), []
    store.warn = said.append
    store.save(1, some(), {})
    disk.full = True
    store.begin(2, some(), {})
    store.complete()  # waits
    disk.full = False
    store.begin(3, some(), {})
    store.wait()
    assert [c.step for c in store.complete()] == [1, 3]
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert "training goes on" in said[0]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "steps").write_text("a file")
    store = CheckpointStore(tmp_path / "steps")
    with pytest.raises(SaveFailedError, match="File exists|Not a directory"):
        store.begin(1, some(), {})


def test_mistakes_of_ours_are_not_a_disks(tmp_path):
    store = CheckpointStore(tmp_path, on_error="continue")
    store.begin(1, {"model": {"odd": torch.zeros(2, dtype=torch.complex128)}}, {})
    with pytest.raises(ValueError, match="odd has dtype"):
        store.wait()


def test_async_save_false_waits_for_the_disk(tmp_path, monkeypatch):
    disk, store = Disk(monkeypatch), CheckpointStore(tmp_path, background=False)
    store.begin(1, some(), {})
    assert (tmp_path / "step-00000001" / "manifest.json").exists()
    assert store.last_place == "none"
    disk.full = True
    with pytest.raises(SaveFailedError, match="step 2 could not be written"):
        store.begin(2, some(), {})


def test_without_room_for_a_copy_it_is_written_at_once(tmp_path, monkeypatch):
    class Memory:
        available = 4

    monkeypatch.setattr(snapshot_module.psutil, "virtual_memory", lambda: Memory)
    monkeypatch.setattr(snapshot_module.torch.Tensor, "clone", lambda *_, **__: pytest.fail("copied"))
    store = CheckpointStore(tmp_path)
    store.begin(1, {"model": {"w": torch.ones(8)}}, {})
    assert (tmp_path / "step-00000001" / "manifest.json").exists()


def test_ranks_of_one_machine_share_the_room_for_copies(monkeypatch):
    """Each would find that its own fits, and all together would end in the system killing one."""

    class Memory:
        available = 400

    monkeypatch.setattr(snapshot_module.psutil, "virtual_memory", lambda: Memory)
    groups = {"model": {"w": Part.whole(torch.ones(16))}}  # 64 bytes, of the half that may be taken
    assert Camera().take(groups, beside=3) is not None
    assert Camera().take(groups, beside=4) is None


def pretend_gpu(monkeypatch, free, total, reserved, share):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free * GIB, total * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: reserved * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: share)


@pytest.mark.parametrize(("peak", "fits"), [(45, True), (60, True), (61, False), (75, False)])
def test_a_copy_on_the_gpu_leaves_the_next_step_its_memory(monkeypatch, peak, fits):
    """80 GiB, of which weights and states take 15, and activations the rest up to the peak: between two steps those are
    the allocator's to give, and the next step's to have."""
    pretend_gpu(monkeypatch, free=4, total=80, reserved=75, share=1.0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 15 * GIB)
    assert snapshot_module.has_room(torch.device("cuda"), 15 * GIB, peak * GIB) == fits


@pytest.mark.parametrize(
    ("free", "share", "expected"),
    [(60, 1.0, 60), (60, 0.5, 20), (10, 0.5, 10), (60, 0.125, 0)],
    ids=["the whole GPU", "half of it", "others have the rest", "more taken than allowed"],
)
def test_a_process_has_no_more_than_its_share_of_a_gpu(monkeypatch, free, share, expected):
    """`torch.cuda.set_per_process_memory_fraction`, or `per_process_memory_fraction` of PYTORCH_ALLOC_CONF: the driver
    still says how much the GPU has."""
    pretend_gpu(monkeypatch, free=free, total=80, reserved=20, share=share)
    assert free_bytes() == expected * GIB


def refuse(device):
    raise RuntimeError("CUDAPluggableAllocator does not yet support getMemoryFraction")


@pytest.mark.parametrize("fraction", [refuse, lambda device: float(2**64 // (80 * GIB))], ids=["pluggable", "async"])
def test_allocators_that_know_no_share_have_all_of_it(monkeypatch, fraction):
    pretend_gpu(monkeypatch, free=60, total=80, reserved=20, share=1.0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fraction)
    assert share_of(0) == 1.0
    assert free_bytes() == 60 * GIB


def test_a_copy_on_the_gpu_keeps_to_the_share_of_its_process(monkeypatch):
    pretend_gpu(monkeypatch, free=75, total=80, reserved=3, share=0.1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 * GIB)
    assert not snapshot_module.has_room(torch.device("cuda"), 2 * GIB, 3 * GIB)
    assert snapshot_module.has_room(torch.device("cuda"), GIB // 2, 3 * GIB)


def test_a_large_batch_to_come_keeps_its_memory(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 30)
    monkeypatch.setattr(snapshot_module, "has_room", lambda device, size, peak: asked.append(peak))
    store = CheckpointStore(tmp_path)
    for most in (0, 45, 20):
        store.leave_room(most)
        assert store._camera._of_gpu([torch.zeros(4)], available=0) is None
    assert asked == [30, 45, 45]


def test_the_last_one_is_written_as_it_is(tmp_path, monkeypatch):
    """Nobody changes the tensors any more: no copy."""
    monkeypatch.setattr(snapshot_module.torch.Tensor, "clone", lambda *_, **__: pytest.fail("copied"))
    store = CheckpointStore(tmp_path)
    store.begin(1, {"model": {"w": torch.arange(8).reshape(2, 4).t()}}, {"step": 1}, last=True)
    assert store.last_place == "held"
    checkpoint = store.at(1)  # waits
    assert torch.equal(checkpoint.tensors("model")["w"], torch.arange(8).reshape(2, 4).t())


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), KeyboardInterrupt()])
def test_an_error_before_the_writing_begins_ends_the_run(tmp_path, monkeypatch, error):
    """Leaving the block waited for ever for what no thread was writing."""

    def taken(*_):
        raise error

    monkeypatch.setattr(Camera, "take", taken)
    ended = []

    def begin():
        try:
            with CheckpointStore(tmp_path) as store:
                store.begin(1, some(), {})
        except BaseException as raised:
            ended.append(raised)

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    thread.join(20)
    assert ended == [error]
