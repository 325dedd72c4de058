"""A step that cannot be recorded runs eagerly, and nothing of the attempt is waited for or kept: without a GPU, with a
recording that fails as CUDA's do."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from automodel.engine import captured, recording
from automodel.engine.captured import MOST_FAILURES, MOST_SHORTAGES, WORTH, CapturedStep, Uncaptured
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.late_update import LateUpdates
from automodel.kernels.side_stream import SideStream
from automodel.models.recompute import Checkpoint, Kept


class Read:
    """What a piece reads."""


class Stream:
    def __init__(self, name: str, waits: list[tuple[str, str]]):
        self.name, self.waits = name, waits

    def wait_stream(self, other) -> None:
        self.waits.append((self.name, other.name))


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
    """The current stream, who waited for whom, and what was put right."""
    waits: list[tuple[str, str]] = []
    seen = SimpleNamespace(
        waits=waits, main=Stream("main", waits), recording=Stream("recording", waits), ended=[], released=[], states=[]
    )
    seen.streams = [seen.main]

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
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: 1.0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: seen.streams[-1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    pools = itertools.count(8)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
    monkeypatch.setattr(Graph, "living", Counter())
    monkeypatch.setattr(torch, "rand", draw)
    monkeypatch.setattr(recording, "_BROKEN", [])
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *place: seen.ended.append(place), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *place: seen.released.append(place), raising=False)
    return seen


def step_of(cuda, parameter: torch.nn.Parameter | None = None) -> tuple[CapturedStep, list[str]]:
    """Before its first recording, and what it says."""
    step = CapturedStep.__new__(CapturedStep)
    step.failures = step.shortages = step.replays = 0
    step.largest = None
    step.graphs, step.pool, step.stream, step.accumulates = {}, (0, 7), cuda.recording, False
    step.optimizer = FlatAdamW([torch.nn.Parameter(torch.ones(2)) if parameter is None else parameter], lr=0.1)
    step.side = step.late = step.device = step.ring = None
    step.model, step.loss = torch.nn.Module(), SimpleNamespace(tally=None)
    said: list[str] = []
    step.warn = said.append
    return step, said


def test_nothing_of_a_failed_recording_is_kept(cuda):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    step, said = step_of(cuda, weight)
    step.side, step.late = SideStream.__new__(SideStream), LateUpdates.__new__(LateUpdates)
    step.side.pieces, step.late.done = deque(), [None, None]
    step.graphs = {("before",): Graph()}
    step.model._gradient_checkpointing_func = Checkpoint(Kept(), 0)
    waiting = step.model._gradient_checkpointing_func.memory.here
    kept = []

    def work() -> None:
        read = Read()
        kept.append(weakref.ref(read))
        step.side.pieces.append(("an event of the recording", read))
        waiting[0] = [read]
        step.late.done[1] = SimpleNamespace()  # the second layer was never reached
        weight.grad = torch.ones(2, 2)
        step.optimizer._captured.append([weight.grad.data_ptr()])
        assert cuda.streams[-1] is cuda.recording
        assert cuda.waits[-1] == ("recording", "main"), "torch writes seeds that the steps under way still read"
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
    assert not step.optimizer._finished, "tables of graphs that are gone"
    assert cuda.streams[-1] is cuda.main, "what follows is queued where everybody looks for it"
    assert cuda.waits[-1] == ("main", "recording")
    assert not step.graphs, "torch would refuse their random numbers, or has taken what cuBLAS works in from them"
    assert cuda.ended == cuda.released == [(0, (0, 7))], "otherwise no memory is given back"
    assert step.pool == (0, 8), "into the same one the next recording is refused"
    assert len(recording._BROKEN) == 1, "the allocator of page-locked memory still asks it"
    assert cuda.states == ["a fresh copy"], "otherwise whoever draws random numbers fails"
    for _ in range(MOST_FAILURES):
        assert isinstance(step._record(work), Uncaptured)
    assert len(said) == MOST_FAILURES, "then no more are tried"
    assert ["all shapes that are new" in words for words in said] == [False, False, True]


def test_a_recording_that_does_not_begin_is_over(cuda, monkeypatch):
    """torch has told the allocator and the generator by then."""
    step, _ = step_of(cuda)

    def refuse(self, pool, capture_error_mode):
        raise RuntimeError("already recording to mempool_id")

    monkeypatch.setattr(Graph, "capture_begin", refuse)
    assert isinstance(step._record(lambda: None), Uncaptured)
    assert cuda.ended == [(0, (0, 7))]
    assert cuda.states == ["a fresh copy"]
    assert cuda.streams[-1] is cuda.main


def test_graphs_make_room_for_the_next(cuda, monkeypatch):
    """A recording that finds no memory is made again without the others; where there are none, it runs eagerly, with
    whatever memory can be had."""
    step, said = step_of(cuda)
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append(f"emptied with {len(step.graphs)} graphs"))
    monkeypatch.setattr(Graph, "capture_end", lambda self: None)
    eager = Uncaptured(lambda: None, lambda: None)
    step.graphs = {("a",): Graph(), ("b",): eager, ("c",): Graph()}
    held: list[weakref.ref] = []

    def work() -> None:
        assert not any(ref() for ref in held), "what the first recording took is still there"
        recorded = Read()
        held.append(weakref.ref(recorded))
        if len(step.graphs) > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    made = step._record(work)
    assert isinstance(made, Graph)
    assert len(held) == 2
    assert step.graphs == {("b",): eager}, "what cannot be recorded is not tried again"
    assert done == ["waited", "waited", "emptied with 1 graphs"]
    assert step.failures == 0
    assert [words.partition(":")[0] for words in said] == ["GPU memory is short"]

    def never() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    assert isinstance(step._record(never), Uncaptured)
    assert step.failures == 1
    assert said[-1].endswith("runs eagerly instead: CUDA out of memory")


@pytest.mark.parametrize("worth", [False, True])
def test_graphs_that_do_not_last_are_not_made(cuda, monkeypatch, worth):
    """Each of two shapes finds room only without the other. Where they come in turns, that is worth nothing; where each
    is replayed often enough, it goes on for ever."""
    step, said = step_of(cuda)
    monkeypatch.setattr(Graph, "capture_end", lambda self: None)
    monkeypatch.setattr(Graph, "replay", lambda self: None, raising=False)
    monkeypatch.setattr(step, "_drop_gradients", lambda: None)
    recorded = []

    def work() -> None:
        if step.failures < MOST_FAILURES:
            recorded.append(1)
            if any(isinstance(graph, Graph) for graph in step.graphs.values()):
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    turns = 2 * MOST_SHORTAGES + 4
    for turn in range(turns):
        for _ in range(WORTH if worth else 1):
            step._play((turn % 2,), lambda: step._record(work))
    if worth:
        assert len(recorded) == 2 * turns - 1
        assert len(said) == 1, "once is enough"
        return
    assert len(recorded) == 2 * (MOST_SHORTAGES + 1)
    assert len(said) == 2
    assert "all run eagerly from here on" in said[-1]
    assert "accumulation" in said[-1], "what to do"
    assert all(isinstance(graph, Uncaptured) for graph in step.graphs.values())


def test_a_recording_that_is_only_tried_leaves_nothing(cuda, monkeypatch):
    """Neither its pool, which goes with it, nor a failure, which says nothing about the steps to come."""
    step, _ = step_of(cuda)
    step.failures = MOST_FAILURES - 1
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


@pytest.mark.parametrize(
    ("recorded", "roomy", "error", "tried"),
    [
        (True, False, None, 1),
        (True, True, None, 0),
        (False, False, None, 0),
        (True, False, torch.cuda.OutOfMemoryError("CUDA out of memory"), 1),
        (True, False, RuntimeError("operation not permitted when stream is capturing"), 1),
    ],
    ids=["short of memory", "roomy", "not asked", "no memory for a graph", "not to be recorded at all"],
)
def test_a_batch_is_tried_as_a_graph_where_memory_is_short(cuda, monkeypatch, recorded, roomy, error, tried):
    """What fits a plain step need not fit a graph, which would be found out in the first step, too late to halve it.
    That something cannot be recorded at all is not a matter of memory."""
    step, said = step_of(cuda)
    found = []

    def learn(_static) -> None:
        found.append(cuda.streams[-1].name)
        if error is not None:
            raise error

    monkeypatch.setattr(captured, "StaticBatch", lambda *_: SimpleNamespace(send=lambda *_: None))
    monkeypatch.setattr(captured, "is_roomy", lambda: roomy)
    monkeypatch.setattr(Graph, "capture_end", lambda self: None)
    monkeypatch.setattr(step, "_rehearse", lambda _static: None)
    monkeypatch.setattr(step, "_learn", learn)
    expected = pytest.raises(torch.cuda.OutOfMemoryError) if isinstance(error, torch.cuda.OutOfMemoryError) else None
    with expected or nullcontext():
        step.probe(SimpleNamespace(num_labels=1), recorded)
    assert found == ["recording"] * tried
    assert not said
    assert not step.graphs
    assert isinstance(step._record(lambda: None), Graph), "its pool is not used again"


def test_nothing_of_a_rehearsal_that_does_not_fit_is_kept(cuda, monkeypatch):
    """Whoever tries a smaller batch next finds all memory, and nobody writes to it any more."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    step, _ = step_of(cuda, weight)
    step.unsettled, step.seed, step.loss_sum, step.last_loss = 0, *(torch.zeros(1) for _ in range(3))
    step.side = SideStream.__new__(SideStream)
    step.side.pieces = deque()
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append(f"waited for {len(step.side.pieces)} piece"))

    def learn(_static) -> None:
        assert cuda.streams[-1] is cuda.recording
        step.side.pieces.append(("an event", Read()))
        weight.grad = torch.ones(2, 2)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step, "_learn", learn)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        step._rehearse(None)
    assert done == ["waited for 1 piece"]
    assert not step.side.pieces
    assert weight.grad is None
    assert cuda.streams[-1] is cuda.main


@pytest.mark.parametrize(
    ("free", "share", "makes"), [(600, 1.0, False), (300, 1.0, True), (600, 0.5, False), (600, 0.4, True)]
)
def test_unused_memory_is_handed_back_before_it_runs_short(cuda, monkeypatch, free, share, makes):
    """Of 1000 bytes this process holds 100, and a step has needed 200; somebody may have set it a limit."""
    done = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, 1000))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: share)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 300)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append(1))
    recording.make_room()
    assert bool(done) == makes


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("operation not permitted when stream is capturing"), False),
    ],
)
def test_who_ran_out_of_memory(error, short):
    assert recording.ran_out(error) == short
