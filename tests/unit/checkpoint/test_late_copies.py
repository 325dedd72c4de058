"""Tensors leave a GPU whole, however late the device is."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import load

from automodel.checkpoint import snapshot, tensor_file
from late_device import Device, OnDevice


def written(monkeypatch, path, seed: int, ignored: str = "") -> bool:
    """Whether the file, and what was hashed of it, have the tensors' numbers."""
    device = Device(seed, ignored)
    generator = torch.Generator().manual_seed(seed)
    named = {f"gpu.{size}": torch.randn(size, generator=generator) for size in (1, 3, 700, 64)}
    named |= {"half": torch.randn(33, 5, generator=generator).bfloat16(), "none": torch.ones(0, 4)}
    on_gpu = {name: tensor.as_subclass(OnDevice) for name, tensor in named.items()}
    host = {"host": torch.randn(50, generator=generator)}
    with monkeypatch.context() as patch:
        device.install(patch)
        patch.setattr(tensor_file, "SEAT", 256)
        patch.setattr(tensor_file, "bus_of", lambda _: bus)
        bus = torch.cuda.Stream()
        write = tensor_file.NewFile.write

        def slowly(file, piece):
            write(file, piece)
            device.work(device.chance.choice([0, 1, 8]))

        patch.setattr(tensor_file.NewFile, "write", slowly)
        done = tensor_file.write_tensors(path, {**on_gpu, **host})
    data = path.read_bytes()
    found = load(data)
    assert found.keys() == named.keys() | host.keys()
    whole = all(torch.equal(found[name], tensor) for name, tensor in {**named, **host}.items())
    return whole and done.sha256 == hashlib.sha256(data).hexdigest()


def test_a_file_has_the_numbers_of_the_gpu(monkeypatch, tmp_path):
    assert all(written(monkeypatch, tmp_path / "file", seed) for seed in range(20))


@pytest.mark.parametrize("ignored", ["synchronize"])
def test_it_is_the_waiting_that_makes_it_so(monkeypatch, tmp_path, ignored):
    assert not all(written(monkeypatch, tmp_path / "file", seed, ignored) for seed in range(5))


def kept(monkeypatch, seed: int, ignored: str = "") -> bool:
    """Whether a snapshot in page-locked memory has the numbers of its time, though the next step changes them."""
    device = Device(seed, ignored)
    tensors = [torch.zeros(size).as_subclass(OnDevice) for size in (5, 300, 7)]
    with monkeypatch.context() as patch:
        device.install(patch)
        patch.setattr(snapshot, "BLOCK", 512)
        bus = torch.cuda.Stream()
        patch.setattr(snapshot, "bus_of", lambda _: bus)

        def step(number: int) -> None:
            for tensor in tensors:
                device.put(lambda tensor=tensor: tensor.as_subclass(torch.Tensor).fill_(number))

        step(1)
        copies, ready = snapshot._over_the_bus(tensors)
        step(2)
        device.work(device.chance.choice([0, 5, 20]))
        for event in ready:
            event.synchronize()
    return all((copy == 1).all() for copy in copies)


def test_a_snapshot_is_of_its_time(monkeypatch):
    assert all(kept(monkeypatch, seed) for seed in range(20))
    for ignored in ("wait", "synchronize"):
        assert not all(kept(monkeypatch, seed, ignored) for seed in range(20)), "it is the waiting that makes it so"
