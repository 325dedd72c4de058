"""What batches will be like: tokens, and positions that the head reads, of some samples of a store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from automodel.data.batch import IGNORE
from automodel.data.collate import CAUSAL_LM
from automodel.data.store import TokenStore

MOST_SAMPLES = 4096  # looked at: a few MB of labels, which may have to come from a disk


@dataclass(frozen=True)
class Sizes:
    """One number for each sample that was looked at."""

    tokens: np.ndarray
    reads: np.ndarray | None = None
    """None: the head reads as many positions of every batch."""

    def batches(self, count: int, documents: int) -> Sizes:
        """Of so many random batches, always the same ones."""
        drawn = np.random.default_rng(0).integers(0, len(self.tokens), (count, documents))
        reads = None if self.reads is None else self.reads[drawn].sum(1)
        return Sizes(self.tokens[drawn].sum(1), reads)


def sizes_of(store: TokenStore, task: str) -> Sizes:
    """Of samples from all over the store."""
    count = len(store)
    chosen = np.arange(count)
    if count > MOST_SAMPLES:
        chosen = np.random.default_rng(0).choice(count, MOST_SAMPLES, replace=False)
    lengths = store.lengths[chosen]
    labels = store.token_labels
    if labels is None:
        return Sizes(lengths)
    skipped = task == CAUSAL_LM  # nothing predicts a document's first token
    counted = [np.count_nonzero(labels[store.offsets[i] + skipped : store.offsets[i + 1]] != IGNORE) for i in chosen]
    return Sizes(lengths, np.asarray(counted, dtype=np.int64))
