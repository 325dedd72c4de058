"""Weights, and inputs of layers that were away, reach a GPU whole, however late the device is."""

from __future__ import annotations

import torch
from torch import Tensor

from automodel.models import onto_gpu
from automodel.models.onto_gpu import Way
from automodel.models.recompute import HostMemory
from late_device import Device, OnDevice


def carried(monkeypatch, seed: int, ignored: str = "") -> bool:
    """Whether tensors of several dtypes arrived, through seats that are smaller than they."""
    device = Device(seed, ignored)
    sources = [torch.randn(shape) for shape in [(7, 33), (1,), (), (300, 5), (0, 4)]]
    sources += [source.bfloat16() for source in sources]
    targets = [torch.full(source.shape, 7.0).as_subclass(OnDevice) for source in sources]
    with monkeypatch.context() as patch:
        device.install(patch)
        patch.setattr(onto_gpu, "SEAT", 256)
        way = Way(torch.device("cuda", 0))
        for target, source in zip(targets, sources, strict=True):
            way.carry(target, source.clone())  # which is gone when it returns
            device.work(device.chance.choice([0, 1, 8]))
        device.work(10_000)
    return all(torch.equal(t.as_subclass(Tensor), s.float()) for t, s in zip(targets, sources, strict=True))


def test_weights_arrive(monkeypatch):
    assert all(carried(monkeypatch, seed) for seed in range(20))


def test_it_is_the_waiting_that_makes_it_so(monkeypatch):
    assert not all(carried(monkeypatch, seed, "synchronize") for seed in range(5))


def computed_again(monkeypatch, seed: int, ignored: str = "") -> bool:
    """Whether every layer of several passes got back what it had sent. Layers drop their inputs once they have sent
    them, and those that came back once they have read them."""
    device, found = Device(seed, ignored), []
    with monkeypatch.context() as patch:
        device.install(patch)
        memory = HostMemory(5)
        for number in range(6):
            size = device.chance.choice([2, 9])
            for layer in range(5):
                made = torch.ones(size, dtype=torch.int64)
                device.put(lambda made=made, value=10 * number + layer: made.fill_(value))  # by the layer before
                memory.send(layer, [device.own(made)])
                device.work(device.chance.choice([0, 1, 5]))
            for layer in reversed(range(5)):
                (tensor,) = memory.take(layer, torch.device("cuda"))
                memory.fetch(layer - 1, torch.device("cuda"))
                there, wanted = tensor.as_subclass(Tensor), 10 * number + layer
                device.put(lambda there=there, wanted=wanted: found.append(bool((there == wanted).all())))
                del tensor
                device.work(device.chance.choice([0, 1, 5]))
        device.work(10_000)
    assert len(found) == 30
    return all(found)


def test_inputs_come_back(monkeypatch):
    assert all(computed_again(monkeypatch, seed) for seed in range(30))


def test_it_is_the_waiting_that_brings_them_back(monkeypatch):
    assert not all(computed_again(monkeypatch, seed, "wait") for seed in range(10))
