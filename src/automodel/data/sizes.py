"""What batches will be like: tokens, and positions that the head reads, of some samples of a store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from automodel.data.batch import IGNORE
from automodel.data.mixture import Mixture
from automodel.data.row_format import LabelPlace
from automodel.data.store import TokenStore

MOST_SAMPLES = 4096  # looked at: a few MB of labels, which may have to come from a disk


@dataclass(frozen=True)
class Sizes:
    """One number for each sample that was looked at."""

    tokens: np.ndarray
    reads: np.ndarray | None = None
    """None: the head reads as many positions of every batch."""
    together: bool = False
    """Whether a batch has samples that follow each other here, not any."""

    def batches(self, count: int, documents: int) -> Sizes:
        """Of so many random batches, always the same ones."""
        random, samples = np.random.default_rng(0), len(self.tokens)
        if self.together:
            firsts = random.integers(0, max(1, samples - documents + 1), (count, 1))
            drawn = (firsts + np.arange(documents)) % samples
        else:
            drawn = random.integers(0, samples, (count, documents))
        reads = None if self.reads is None else self.reads[drawn].sum(1)
        return Sizes(self.tokens[drawn].sum(1), reads)


def sizes_of(
    store: TokenStore,
    place: LabelPlace,
    *,
    mixture: Mixture | None = None,
    shuffled: bool = True,
    grouped: bool = False,
) -> Sizes:
    """Of samples from all over an epoch. `grouped`: batches have samples of one length."""
    epoch = np.arange(len(store)) if mixture is None else mixture.epoch(0, 0, shuffled)
    if len(epoch) > MOST_SAMPLES:
        epoch = epoch[np.sort(np.random.default_rng(0).choice(len(epoch), MOST_SAMPLES, replace=False))]
    chosen = np.sort(epoch) if shuffled else epoch  # as they lie on the disk
    if grouped:
        chosen = chosen[np.argsort(store.lengths[chosen], kind="stable")]
    return Sizes(store.lengths[chosen], _reads(store, place, chosen), together=grouped or not shuffled)


def _reads(store: TokenStore, place: LabelPlace, chosen: np.ndarray) -> np.ndarray | None:
    labels = store.token_labels
    if labels is None:
        return None
    skipped = place == "next_token"  # nothing predicts a document's first token
    counted = [np.count_nonzero(labels[store.offsets[i] + skipped : store.offsets[i + 1]] != IGNORE) for i in chosen]
    return np.asarray(counted, dtype=np.int64)
