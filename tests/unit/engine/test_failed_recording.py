"""A step that cannot be recorded runs eagerly, and nothing of the attempt is waited for or kept: without a GPU, with a
recording that fails as CUDA's do."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, deque
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from automodel.engine import captured, recording
from automodel.engine.captured import MOST_FAILURES, CapturedStep, Uncaptured
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.late_update import LateUpdates
from automodel.kernels.side_stream import SideStream


class Read:
    """What a piece reads."""


class Graph:
    """As in torch, where a recording broke: it does not end, either. A pool goes with the last graph in it, and torch
    does not take its number again."""

    living: ClassVar[Counter] = Counter()

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        if self.living.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.living[pool] += 1
        self.pool = pool

    def __del__(self):
        if hasattr(self, "pool"):
            self.living[self.pool] -= 1

    def capture_end(self):
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def cuda(monkeypatch) -> SimpleNamespace:
    """The current stream, and what was put right."""
    seen = SimpleNamespace(streams=["main"], ended=[], released=[], states=[])

    def draw(*shape, device):
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    class On:
        def __init__(self, which):
            self.which = which

        def __enter__(self):
            self.before = seen.streams[-1]
            seen.streams.append(self.which)

        def __exit__(self, *args):
            seen.streams.append(self.before)

    generator = SimpleNamespace(clone_state=lambda: "a fresh copy", graphsafe_set_state=seen.states.append)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "stream", On)
    pools = itertools.count(8)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
    monkeypatch.setattr(Graph, "living", Counter())
    monkeypatch.setattr(torch, "rand", draw)
    monkeypatch.setattr(recording, "_BROKEN", [])
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *place: seen.ended.append(place), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *place: seen.released.append(place), raising=False)
    return seen


def test_nothing_of_a_failed_recording_is_kept(cuda):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    step = CapturedStep.__new__(CapturedStep)
    step.failures = 0
    step.graphs, step.pool, step.stream, step.accumulates = {}, (0, 7), "recording", False
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
        assert cuda.streams[-1] == "recording"
        raise RuntimeError("operation not permitted when stream is capturing\nmore about it")

    made = step._record(work)
    assert isinstance(made, Uncaptured)
    (words,) = said
    assert words.endswith("runs eagerly instead: operation not permitted when stream is capturing")
    assert not step.side.pieces
    assert kept[0]() is None
    assert step.late.done == [None, None]
    assert weight.grad is None
    assert not step.optimizer._captured, "64 recordings that failed would be said to be too many"
    assert cuda.streams[-1] == "main", "what follows is queued where everybody looks for it"
    assert cuda.ended == cuda.released == [(0, (0, 7))], "otherwise no memory is given back"
    assert step.pool == (0, 8), "into the same one the next recording is refused"
    assert len(recording._BROKEN) == 1, "the allocator of page-locked memory still asks it"
    assert cuda.states == ["a fresh copy"], "otherwise whoever draws random numbers fails"
    for _ in range(MOST_FAILURES):
        assert isinstance(step._record(work), Uncaptured)
    assert len(said) == MOST_FAILURES, "then no more are tried"
    assert ["all shapes that are new" in words for words in said] == [False, False, True]


def test_graphs_make_room_for_the_next(cuda, monkeypatch):
    """A recording that finds no memory is made again without the others; where there are none, it does not fit."""
    step = CapturedStep.__new__(CapturedStep)
    step.failures, step.pool, step.stream, step.accumulates = 0, (0, 7), "recording", False
    step.optimizer, step.side, step.late = FlatAdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1), None, None
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append(f"emptied with {len(step.graphs)} graphs"))
    monkeypatch.setattr(Graph, "capture_end", lambda self: None)
    eager = Uncaptured(lambda: None, lambda: None)
    step.graphs = {("a",): Graph(), ("b",): eager, ("c",): Graph()}

    def work() -> None:
        if len(step.graphs) > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    made = step._record(work)
    assert isinstance(made, Graph)
    assert step.graphs == {("b",): eager}, "what cannot be recorded is not tried again"
    assert done[0] == "waited"
    assert done[-1] == "emptied with 1 graphs"

    def never() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        step._record(never)
    assert step.failures == 0


def test_unused_memory_makes_room_before_graphs_do(cuda, monkeypatch):
    """While a recording runs nobody can hand memory back: it is made again once that was done."""
    step = CapturedStep.__new__(CapturedStep)
    step.failures, step.pool, step.stream, step.accumulates = 0, (0, 7), "recording", False
    step.optimizer, step.side, step.late = FlatAdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1), None, None
    kept = {("a",): Graph()}
    step.graphs = dict(kept)
    unused = [Read()]
    held: list[weakref.ref] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", unused.clear)
    monkeypatch.setattr(Graph, "capture_end", lambda self: None)

    def work() -> None:
        assert not any(ref() for ref in held), "what the first recording took is still there"
        recorded = Read()
        held.append(weakref.ref(recorded))
        if unused:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    assert isinstance(step._record(work), Graph)
    assert len(held) == 2
    assert step.graphs == kept
    assert step.failures == 0


def test_a_recording_that_is_only_tried_leaves_nothing(cuda, monkeypatch):
    """Neither its pool, which goes with it, nor a failure, which says nothing about the steps to come."""
    step = CapturedStep.__new__(CapturedStep)
    step.failures, step.pool, step.stream, step.accumulates, step.graphs = MOST_FAILURES - 1, (0, 7), "any", False, {}
    step.optimizer, step.side, step.late = FlatAdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1), None, None
    step.device = step.ring = None
    monkeypatch.setattr(captured, "StaticBatch", lambda *_: None)

    def learn(_static) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(step, "_learn", learn)
    with pytest.raises(RuntimeError, match="operation not permitted"):
        step.try_recording(None)
    monkeypatch.setattr(step, "_learn", lambda _static: None)
    monkeypatch.setattr(Graph, "capture_end", lambda self: None)
    step.try_recording(None)
    assert isinstance(step._record(lambda: None), Graph), "otherwise torch refuses the next one"
