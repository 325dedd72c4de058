"""The largest shape of a run is recorded before the first batch, and again where graphs had to go."""

from __future__ import annotations

import torch

from automodel.data.collate import PackedCollator
from automodel.data.samples import SampleWriter
from automodel.data.store import TokenStore
from automodel.engine import captured
from automodel.engine.captured import CapturedStep


class Graph:
    def replay(self) -> None:
        pass


def batches(*lengths: int):
    writer = SampleWriter()
    for row, length in enumerate(lengths):
        writer.add(row, list(range(length)), token_labels=list(range(length)))
    collate = PackedCollator(
        TokenStore.in_memory(writer.finish()), "next_token", bucket_tokens=8, max_seqlen=64, micro_batch_size=1
    )
    return [collate([row]) for row in range(len(lengths))]


def step_of(monkeypatch) -> tuple[CapturedStep, list[tuple[int, int]]]:
    """And what is recorded: tokens of the shape, and of the batch that lay there (a rehearsal reads it)."""
    recorded: list[tuple[int, int]] = []

    class Static:
        def __init__(self, like, device, ring):
            self.size, self.sent = len(like.input_ids_T), 0

        def send(self, batch, count):
            assert count > 0
            self.sent = batch.num_tokens

    def capture(static):
        recorded.append((static.size, static.sent))
        return Graph()

    monkeypatch.setattr(captured, "StaticBatch", Static)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    step = CapturedStep.__new__(CapturedStep)
    step.statics, step.graphs, step.replays, step.largest = {}, {}, 0, None
    step.device, step.ring = "cuda", None
    step.optimizer = type("Optimizer", (), {"forget_captures": lambda self: None})()
    step._capture = capture
    return step, recorded


def test_the_largest_comes_first_and_is_recorded_once(monkeypatch):
    small, middle, large = batches(5, 20, 60)
    step, recorded = step_of(monkeypatch)
    step.largest = large
    for batch in (small, middle, large, small):
        step._replay(batch, 1.0)
    assert recorded == [(64, 60), (8, 5), (24, 20)]
    step._let_go_of_graphs()
    step._replay(small, 1.0)
    assert recorded[3:] == [(64, 60), (8, 5)]


def test_what_a_shortage_has_taken_begins_with_the_largest_again(monkeypatch):
    """And where the largest alone leaves too little for the next, that one gets the room."""
    small, middle, large = batches(5, 20, 60)
    step, _ = step_of(monkeypatch)
    tried: list[int] = []
    short = iter([False, False, True, False, True, False, False, False])

    def learn(static):
        tried.append(static.size)
        if next(short):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    def recorded(work):
        work()
        return Graph()

    del step._capture
    step._learn, step._recorded, step.warn = learn, recorded, lambda text: None
    step.compiled, step.rehearsed, step.apart, step.failures, step.shortages = False, True, True, 0, 0
    step.largest = large
    step._replay(small, 1.0)
    assert tried == [64, 8]
    step._replay(middle, 1.0)
    assert tried[2:] == [24, 64, 24, 24]  # the largest first; it went when the second attempt found nothing, either
    assert step.failures == 0
    step._replay(small, 1.0)
    assert tried[6:] == [64, 8]


def test_where_nobody_knows_it_shapes_are_recorded_as_they_come(monkeypatch):
    small, large = batches(5, 60)
    step, recorded = step_of(monkeypatch)
    for batch in (small, large):
        step._replay(batch, 1.0)
    assert recorded == [(8, 5), (64, 60)]
