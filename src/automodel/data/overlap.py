"""Texts that are learned from and measured on: how many held-out samples are among the training samples.

A validation set cut from the training file (`split: train[90%:]` beside the whole file) gives numbers that say nothing
about new texts, and nothing in the losses shows it. Samples are compared token by token, but only those that agree in
their length and in a few tokens: eight looks a sample, in numpy, however long it is.
"""

from __future__ import annotations

import numpy as np

from automodel.data.store import TokenStore

LOOKS = 8  # tokens of a sample that must agree before all are compared
MIX = np.uint64(0x9E3779B97F4A7C15)  # an odd number without a pattern, which spreads tokens over 64 bits


def held_out_and_learned(train: TokenStore, validation: TokenStore) -> int:
    """How many samples of `validation` are in `train`, too."""
    marks = _marks(validation)
    alike = np.flatnonzero(np.isin(_marks(train), marks))
    learned = {_tokens(train, index) for index in alike}
    return sum(_tokens(validation, index) in learned for index in range(len(marks))) if learned else 0


def _marks(store: TokenStore) -> np.ndarray:
    """A number for each sample, equal for equal samples: made of its length and of tokens from all over it."""
    starts, lengths = np.asarray(store.offsets[:-1], dtype=np.int64), np.asarray(store.lengths, dtype=np.int64)
    marks = lengths.astype(np.uint64)
    for look in range(LOOKS):
        places = starts + np.maximum(lengths - 1, 0) * look // (LOOKS - 1)
        marks = marks * MIX + store.input_ids[np.minimum(places, len(store.input_ids) - 1)].astype(np.uint64)
    return marks


def _tokens(store: TokenStore, index: int) -> bytes:
    start, end = int(store.offsets[index]), int(store.offsets[index + 1])
    return np.asarray(store.input_ids[start:end], dtype=np.int64).tobytes()
