"""Batches reach a captured step whole, however late the device is: without a GPU, with streams that are queues of work
and a device that does it in any order that streams and events allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from automodel.engine.static_batch import Ring, StaticBatch

Work = tuple[Callable[[], bool], Callable[[], object]]
"""Whether it may begin, and what it does."""


class Device:
    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.streams: list[Stream] = []
        self.current = Stream(self)

    def work(self, pieces: int) -> None:
        """Does some of what may be done."""
        for _ in range(pieces):
            ready = [stream.queue for stream in self.streams if stream.queue and stream.queue[0][0]()]
            if not ready:
                return
            self.chance.choice(ready).popleft()[1]()

    def put(self, work: Callable[[], object], when: Callable[[], bool] = lambda: True) -> None:
        self.current.queue.append((when, work))


class Stream:
    def __init__(self, device: Device):
        self.queue: deque[Work] = deque()
        device.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        passed: list[int] = []
        other.queue.append((lambda: True, lambda: passed.append(1)))
        self.queue.append((lambda: bool(passed), lambda: None))


class Event:
    """As torch's: nobody waits for one that was never recorded."""

    def __init__(self, device: Device, ignored: set[str]):
        self.device, self.ignored = device, ignored
        self.passed = [1]

    def record(self) -> None:
        self.passed = passed = []
        self.device.put(lambda: passed.append(1))

    def wait(self) -> None:
        passed = self.passed
        if "wait" not in self.ignored:
            self.device.put(lambda: None, lambda: bool(passed))

    def synchronize(self) -> None:
        while not self.passed and "synchronize" not in self.ignored:
            self.device.work(1)


class On:
    def __init__(self, device: Device, stream: Stream):
        self.device, self.stream = device, stream

    def __enter__(self):
        self.before, self.device.current = self.device.current, self.stream

    def __exit__(self, *_):
        self.device.current = self.before


class OnDevice(Tensor):
    """Memory of the device: what is copied there arrives later."""

    device_of_test: Device

    def copy_(self, other, non_blocking=False):
        target, source = self.as_subclass(Tensor), other.as_subclass(Tensor)
        self.device_of_test.put(lambda: target.copy_(source))
        return self


@dataclass
class Batch:
    tokens: Tensor
    weights: Tensor
    documents: int


def received(monkeypatch, seed: int, ignored: set[str]) -> bool:
    """Whether each of many steps found its own batch."""
    device = Device(seed)
    empty, empty_like, zeros = torch.empty, torch.empty_like, torch.zeros
    with monkeypatch.context() as patch:
        patch.setattr(OnDevice, "device_of_test", device, raising=False)
        patch.setattr(torch.cuda, "Stream", lambda: Stream(device))
        patch.setattr(torch.cuda, "Event", lambda: Event(device, ignored))
        patch.setattr(torch.cuda, "stream", lambda stream: On(device, stream))
        patch.setattr(torch.cuda, "current_stream", lambda: device.current)
        patch.setattr(torch, "empty", lambda *size, pin_memory, **kw: empty(*size, **kw))
        patch.setattr(torch, "empty_like", lambda like, device: empty_like(like).as_subclass(OnDevice))
        patch.setattr(torch, "zeros", lambda *size, device, **kw: zeros(*size, **kw).as_subclass(OnDevice))
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
    assert all(received(monkeypatch, seed, set()) for seed in range(20))


@pytest.mark.parametrize("ignored", ["wait", "synchronize"])
def test_it_is_the_waiting_that_makes_it_so(monkeypatch, ignored):
    assert not all(received(monkeypatch, seed, {ignored}) for seed in range(20))
