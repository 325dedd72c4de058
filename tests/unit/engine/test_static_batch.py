"""Batches reach a captured step whole, however late the device is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from automodel.engine.static_batch import Ring, StaticBatch
from late_device import Device


@dataclass
class Batch:
    tokens: Tensor
    weights: Tensor
    documents: int


def received(monkeypatch, seed: int, ignored: str = "") -> bool:
    """Whether each of many steps found its own batch."""
    device = Device(seed, ignored)
    with monkeypatch.context() as patch:
        device.install(patch)
        ring, statics, found = Ring("gpu"), {}, []
        for number in range(40):
            size = device.chance.choice([3, 8, 40])  # the ring is made anew when a larger one comes
            batch = Batch(torch.full((size,), number), torch.full((size, 2), number / 7), size)
            if size not in statics:
                statics[size] = StaticBatch(batch, "gpu", ring)  # ty: ignore[invalid-argument-type]
            statics[size].send(batch, number + 1)

            def step(static=statics[size], batch=batch, number=number) -> None:
                there = static.batch.tokens, static.batch.weights, static.scale
                wanted = batch.tokens, batch.weights, torch.tensor([1 / (number + 1)])
                found.append(all(torch.equal(a.as_subclass(Tensor), b) for a, b in zip(there, wanted, strict=True)))

            device.put(step)
            device.work(device.chance.choice([0, 1, 8]))
        device.work(10_000)
    assert len(found) == 40
    return all(found)


def test_every_step_finds_its_own_batch(monkeypatch):
    assert all(received(monkeypatch, seed) for seed in range(20))


@pytest.mark.parametrize("ignored", ["wait", "synchronize"])
def test_it_is_the_waiting_that_makes_it_so(monkeypatch, ignored):
    assert not all(received(monkeypatch, seed, ignored) for seed in range(20))
