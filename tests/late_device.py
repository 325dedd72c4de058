"""A GPU without a GPU: streams are queues of work, and the device does it late, in any order that streams and events
allow. What is right here for every order needs no luck on a real one.

Only copies wait in the queues (`OnDevice`, `Pinned`); whatever else a test does to tensors happens at once. Memory that
nobody holds any more goes to whoever allocates next on the stream that it was allocated on, as torch's allocator does
it: in the order of that stream, and of no other.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Work = tuple[Callable[[], bool], Callable[[], object]]
"""Whether it may begin, and what it does."""


class Device:
    """`ignored`: kinds of waiting that do not happen, to see that they are needed."""

    current: Device

    def __init__(self, seed: int, ignored: str = ""):
        self.chance, self.ignored = random.Random(seed), ignored
        self.streams: list[Stream] = []
        self.stream = Stream(self)

    def work(self, pieces: int) -> None:
        """Does some of what may be done."""
        for _ in range(pieces):
            ready = [stream.queue for stream in self.streams if stream.queue and stream.queue[0][0]()]
            if not ready:
                return
            self.chance.choice(ready).popleft()[1]()

    def put(
        self, work: Callable[[], object], stream: Stream | None = None, when: Callable[[], bool] = lambda: True
    ) -> None:
        (stream or self.stream).queue.append((when, work))

    def own(self, memory: Tensor) -> OnDevice:
        """A tensor of the device, allocated on the current stream."""
        tensor, freed = memory.as_subclass(OnDevice), self.stream.freed
        for taken in freed:
            self.put(lambda taken=taken: taken.fill_(-1))
        freed.clear()
        weakref.finalize(tensor, lambda: freed.append(memory))
        return tensor

    def install(self, patch: Any) -> None:
        """As `torch.cuda`, for as long as pytest's monkeypatch says."""
        empty, empty_like, zeros = torch.empty, torch.empty_like, torch.zeros
        kinds = {None: Tensor, "gpu": OnDevice}

        def made(*size: Any, pin_memory: bool = False, device: Any = None, **kw: Any) -> Tensor:
            if device is not None:
                return self.own(empty(*size, **kw))
            return empty(*size, **kw).as_subclass(Pinned) if pin_memory else empty(*size, **kw)

        patch.setattr(Device, "current", self, raising=False)
        patch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(self))
        patch.setattr(torch.cuda, "Event", lambda: Event(self))
        patch.setattr(torch.cuda, "stream", lambda stream: On(self, stream))
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.stream)
        patch.setattr(torch.cuda, "default_stream", lambda *_: self.streams[0])
        patch.setattr(torch.cuda, "set_device", lambda _: None)
        patch.setattr(torch, "empty", made)
        patch.setattr(torch, "empty_like", lambda like, device: empty_like(like).as_subclass(OnDevice))
        patch.setattr(torch, "zeros", lambda *size, device=None, **kw: zeros(*size, **kw).as_subclass(kinds[device]))


class Stream:
    def __init__(self, device: Device):
        self.device = device
        self.queue: deque[Work] = deque()
        self.freed: list[Tensor] = []
        device.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        passed: list[int] = []
        other.queue.append((lambda: True, lambda: passed.append(1)))
        self.queue.append((lambda: bool(passed), lambda: None))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self) -> Event:
        event = Event(self.device)
        event.record(self)
        return event


class Event:
    """As torch's: nobody waits for one that was never recorded."""

    def __init__(self, device: Device):
        self.device = device
        self.passed = [1]

    def record(self, stream: Stream | None = None) -> None:
        self.passed = passed = []
        self.device.put(lambda: passed.append(1), stream)

    def wait(self, stream: Stream | None = None) -> None:
        passed = self.passed
        if self.device.ignored != "wait":
            self.device.put(lambda: None, stream, lambda: bool(passed))

    def synchronize(self) -> None:
        while not self.passed and self.device.ignored != "synchronize":
            self.device.work(1)


class On:
    def __init__(self, device: Device, stream: Stream):
        self.device, self.stream = device, stream

    def __enter__(self):
        self.before, self.device.stream = self.device.stream, self.stream

    def __exit__(self, *_):
        self.device.stream = self.before


class OnDevice(Tensor):
    """Memory of the device: what is copied there arrives later."""

    is_cuda = True

    def copy_(self, other, non_blocking=False):
        target, source = self.as_subclass(Tensor), other.as_subclass(Tensor)
        Device.current.put(lambda: target.copy_(source))
        return self


class Pinned(Tensor):
    """Memory of the host that the device can write to: what it copies there arrives later."""

    def copy_(self, other, non_blocking=False):
        if isinstance(other, OnDevice):
            return OnDevice.copy_(self, other)
        self.as_subclass(Tensor).copy_(other)
        return self

    def to(self, *_, **__):
        """On its way to the device."""
        arrived = torch.empty(self.shape, dtype=self.dtype).as_subclass(OnDevice)
        return arrived.copy_(self)
