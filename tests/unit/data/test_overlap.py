"""Held-out samples that are learned, too."""

from __future__ import annotations

import numpy as np

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
