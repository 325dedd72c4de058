"""Snapshots of tensors on a GPU: what was there when they were asked for, wherever the copy goes."""

from __future__ import annotations

import pytest
import torch

from automodel.checkpoint import tensor_file
from automodel.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def tensors() -> dict[str, torch.Tensor]:
    flat = torch.arange(1_000_000, dtype=torch.float32, device="cuda")
    return {
        "view": flat[1000:901_000].view(900, 1000),
        "columns": flat[:10_000].view(100, 100).t(),
        "half": torch.randn(77, 3, device="cuda").to(torch.bfloat16),
        "codes": torch.randint(0, 255, (513,), dtype=torch.uint8, device="cuda"),
        "scalar": torch.tensor(2.5, device="cuda"),
        "empty": torch.empty(0, 4, device="cuda"),
        "host": torch.arange(5.0),
    }


@pytest.mark.parametrize("place", ["device", "host", "none"])
def test_what_is_saved_is_what_was_there(tmp_path, monkeypatch, place):
    monkeypatch.setattr(tensor_file, "SEAT", 1 << 16)  # several chunks for the large ones
    store = CheckpointStore(tmp_path, background=place != "none")
    store._camera.device_is_full = place == "host"
    ours = tensors()
    expected = {name: tensor.cpu().clone() for name, tensor in ours.items()}
    for step in (1, 2):  # the second finds memory that the first has left
        torch.cuda._sleep(50_000_000)  # work that is still under way when the copy is asked for
        changed = [tensor.add_(0) if tensor.dtype != torch.uint8 else tensor for tensor in ours.values()]
        store.begin(step, {"model": ours}, {})
        assert store.last_place == place
        for tensor in changed:
            tensor.zero_()  # the next step, right behind it on the same stream
        checkpoint = store.at(step)
        assert checkpoint is not None
        checkpoint.verify()
        saved = checkpoint.tensors("model")
        assert saved.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(saved[name], tensor), (step, name)
        for name, tensor in ours.items():
            tensor.copy_(expected[name])
    store.wait()


def test_begin_does_not_wait_for_the_device(tmp_path):
    """Two seconds of queued work; the call returns long before they are over."""
    import time

    store, ours = CheckpointStore(tmp_path), tensors()
    store.save(1, {"model": ours}, {})  # kernels are loaded
    store.begin(2, {"model": ours}, {})
    store.wait()
    torch.cuda.synchronize()
    clock = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    clock[0].record()
    torch.cuda._sleep(4_000_000_000)
    clock[1].record()
    began = time.perf_counter()
    store.begin(3, {"model": ours}, {})
    called = time.perf_counter() - began
    store.wait()
    torch.cuda.synchronize()
    assert called < clock[0].elapsed_time(clock[1]) / 1e3 / 2


def test_copies_never_share_a_stream_with_a_step():
    """torch hands out its streams in turn; one that a step is recorded on would record the copies of a save, too."""
    bus = tensor_file.bus_of(torch.device("cuda", 0))
    others = {torch.cuda.Stream(priority=priority).cuda_stream for priority in (0, -1) for _ in range(40)}
    assert len(others) == 64, "more than there are"
    assert bus.cuda_stream not in others
    assert tensor_file.bus_of(torch.empty(0, device="cuda").device) is bus
