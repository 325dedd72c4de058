"""Held-out samples that are learned, too."""

from __future__ import annotations

import numpy as np

from automodel.data import overlap
from automodel.data.overlap import held_out_and_learned
from automodel.data.samples import SampleWriter
from automodel.data.store import TokenStore


def store(*samples: list[int]) -> TokenStore:
    writer = SampleWriter()
    for row, tokens in enumerate(samples):
        writer.add(row, np.array(tokens), label=0)
    return TokenStore.in_memory(writer.finish())


def test_equal_samples_are_counted_and_similar_ones_are_not():
    long = list(range(40))
    train = store([1, 2, 3], long, [7], [1, 2, 4])
    nearly = [*long[:2], 99, *long[3:]]  # the same length, the same tokens wherever is looked
    assert held_out_and_learned(train, store([1, 2, 3], [1, 2, 3], long, nearly, [8], [7], [2, 1, 3])) == 4
    assert held_out_and_learned(train, store(nearly)) == 0
    assert held_out_and_learned(store(long), store([1])) == 0


def test_texts_that_all_begin_alike_are_told_apart_a_few_at_a_time(monkeypatch):
    """One long instruction before each text: wherever is looked, all of them are the same."""
    monkeypatch.setattr(overlap, "TOKENS_AT_ONCE", 150)
    texts = [[*range(60), number, 1] for number in range(100, 120)]
    assert held_out_and_learned(store(*texts[:12]), store(*texts[8:])) == 4


def test_files_that_nobody_reads_whole_are_not_looked_through(monkeypatch):
    monkeypatch.setattr(overlap, "CHECKSUM_LIMIT", 8)
    assert held_out_and_learned(store([1, 2, 3]), store([1, 2, 3])) is None
