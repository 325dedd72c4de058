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
        TokenStore.in_memory(writer.finish()), "causal-lm", bucket_tokens=8, max_seqlen=64, micro_batch_size=1
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


def test_where_nobody_knows_it_shapes_are_recorded_as_they_come(monkeypatch):
    small, large = batches(5, 60)
    step, recorded = step_of(monkeypatch)
    for batch in (small, large):
        step._replay(batch, 1.0)
    assert recorded == [(8, 5), (64, 60)]
