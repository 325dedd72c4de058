"""Texts that are learned from and measured on: how many held-out samples are among the training samples.

A validation set cut from the training file (`split: train[90%:]` beside the whole file) gives numbers that say nothing
about new texts, and nothing in the losses shows it. Samples that agree in their length and in a few tokens are compared
by all of their tokens: eight looks a sample, and a sum over those that are alike, all in numpy. Texts with one long
instruction before each are all alike, so no copies are made of them.
"""

from __future__ import annotations

import numpy as np

from automodel.data.store import CHECKSUM_LIMIT, TokenStore

LOOKS = 8  # tokens of a sample that must agree before all are compared
MIX = np.uint64(0x9E3779B97F4A7C15)  # an odd number without a pattern, which spreads tokens over 64 bits
TOKENS_AT_ONCE = 1 << 20


def held_out_and_learned(train: TokenStore, validation: TokenStore) -> int | None:
    """How many samples of `validation` are in `train`, too; None where the files are so large that nobody reads all of
    them before training."""
    if train.input_ids.nbytes + validation.input_ids.nbytes > CHECKSUM_LIMIT:
        return None
    held_out, learned = _marks(validation), _marks(train)
    like = np.flatnonzero(_is_in(learned, held_out))
    alike = np.flatnonzero(_is_in(held_out, learned[like]))
    return int(_is_in(_sums(validation, alike), _sums(train, like)).sum())


def _is_in(marks: np.ndarray, known: np.ndarray) -> np.ndarray:
    """By sorting: numpy 2.0's table of what is known fails beyond 63 bits."""
    return np.isin(marks, known, kind="sort")


def _marks(store: TokenStore) -> np.ndarray:
    """A number for each sample, equal for equal samples: made of its length and of tokens from all over it."""
    starts, lengths = np.asarray(store.offsets[:-1], dtype=np.int64), np.asarray(store.lengths, dtype=np.int64)
    marks = lengths.astype(np.uint64)
    for look in range(LOOKS):
        places = starts + np.maximum(lengths - 1, 0) * look // (LOOKS - 1)
        marks = marks * MIX + store.input_ids[np.minimum(places, len(store.input_ids) - 1)].astype(np.uint64)
    return marks


def _sums(store: TokenStore, samples: np.ndarray) -> np.ndarray:
    """A number for each of these samples, made of all its tokens: each times a number of its place, which has no
    pattern either."""
    sums = np.empty(len(samples), dtype=np.uint64)
    lengths = np.asarray(store.lengths, dtype=np.int64)[samples]
    factors = np.random.default_rng(0).integers(1 << 63, size=lengths.max(initial=0), dtype=np.uint64)
    ends = np.cumsum(lengths)
    first = 0
    while first < len(samples):
        before = ends[first] - lengths[first]
        last = max(first + 1, int(np.searchsorted(ends, before + TOKENS_AT_ONCE, side="right")))
        begins = ends[first:last] - lengths[first:last] - before
        places = np.arange(ends[last - 1] - before) - np.repeat(begins, lengths[first:last])
        where = places + np.repeat(store.offsets[samples[first:last]], lengths[first:last])
        added = np.concatenate([[np.uint64(0)], np.cumsum(store.input_ids[where].astype(np.uint64) * factors[places])])
        sums[first:last] = added[ends[first:last] - before] - added[begins]
        first = last
    return sums
