"""A step that cannot be recorded runs eagerly, and nothing of the attempt is waited for or kept: without a GPU, with a
recording that fails as CUDA's do."""

from __future__ import annotations

import weakref
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from automodel.engine.captured import CapturedStep, Uncaptured
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.late_update import LateUpdates
from automodel.kernels.side_stream import SideStream


class Read:
    """What a piece reads."""


@pytest.fixture
def current(monkeypatch) -> list[str]:
    """The current stream. As in torch, a recording makes its own the current one and leaves it so where it fails."""
    streams = ["main"]

    class Recording:
        def __init__(self, graph, pool, stream, capture_error_mode):
            self.stream = stream

        def __enter__(self):
            streams.append(self.stream)

        def __exit__(self, *args):
            raise RuntimeError("operation not permitted when stream is capturing\nmore about it")

    class Restoring:
        def __init__(self, which):
            self.which = which

        def __enter__(self):
            self.before = streams[-1]
            streams.append(self.which)

        def __exit__(self, *args):
            streams.append(self.before)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", Restoring)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    return streams


def test_nothing_of_a_failed_recording_is_kept(current):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    step = CapturedStep.__new__(CapturedStep)
    step.graphs, step.pool, step.stream, step.accumulates = {}, None, "recording", False
    step.optimizer = FlatAdamW([weight], lr=0.1)
    step.side, step.late = SideStream.__new__(SideStream), LateUpdates.__new__(LateUpdates)
    step.side.pieces, step.late.done = deque(), [None, None]
    said: list[str] = []
    step.warn = said.append
    kept = []

    def work() -> None:
        read = Read()
        kept.append(weakref.ref(read))
        step.side.pieces.append(("an event of the recording", read))
        step.late.done[1] = SimpleNamespace()  # the second layer was never reached
        weight.grad = torch.ones(2, 2)
        step.optimizer._captured.append([weight.grad.data_ptr()])

    made = step._record(work)
    assert isinstance(made, Uncaptured)
    (words,) = said
    assert words.endswith("runs eagerly instead: operation not permitted when stream is capturing")
    assert not step.side.pieces
    assert kept[0]() is None
    assert step.late.done == [None, None]
    assert weight.grad is None
    assert not step.optimizer._captured, "64 recordings that failed would be said to be too many"
    assert current[-1] == "main", "what follows is queued where everybody looks for it"
