"""Weighted mixtures: how many samples of each dataset an epoch holds, and which ones.

A weight is a dataset's share of the samples of an epoch. The dataset with the largest weight is read exactly once in
every epoch (of several with the same weight, the one with the most samples), and the others follow from it: with
weights 0.7 and 0.3, every 700 samples of the first come with 300 of the second. A dataset that has more than its share
is read on in the next epoch where this one stopped, so nothing is read twice before everything was read once; one that
has less is read several times.

Each dataset has its own endless stream of passes, every pass in an order of its own. Epoch e takes the e-th piece of
that stream: a pure function of (seed, epoch), like every order here, so a run resumes exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PASSES = 2**63  # passes of datasets draw from other streams than epochs do


@dataclass(frozen=True)
class Mixture:
    """Several datasets, lying one after another in one store."""

    names: tuple[str, ...]
    """Said in the plan: the paths."""
    sizes: tuple[int, ...]
    """Samples of each, in the order of the store."""
    weights: tuple[float, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each in an epoch."""
        main = max(range(len(self.sizes)), key=lambda i: (self.weights[i], self.sizes[i]))
        each = [self.sizes[main] * weight / self.weights[main] for weight in self.weights]
        return tuple(max(1, round(count)) for count in each)

    @property
    def total(self) -> int:
        """Samples of an epoch."""
        return sum(self.counts)

    def epoch(self, epoch: int, seed: int, shuffle: bool) -> np.ndarray:
        """Sample numbers of an epoch, the datasets spread evenly over it; a shuffled epoch is shuffled once more."""
        starts = np.concatenate([[0], np.cumsum(self.sizes)])
        drawn, places = [], []
        for member, (size, count) in enumerate(zip(self.sizes, self.counts)):
            drawn.append(starts[member] + self._piece(member, size, epoch * count, count, seed, shuffle))
            places.append((np.arange(count) + 0.5) / count)
        return np.concatenate(drawn)[np.argsort(np.concatenate(places), kind="stable")]

    def _piece(self, member: int, size: int, start: int, count: int, seed: int, shuffle: bool) -> np.ndarray:
        """`count` samples of a dataset's endless stream of passes, from `start` on."""
        first, last = start // size, (start + count - 1) // size
        passes = [self._pass(member, number, size, seed, shuffle) for number in range(first, last + 1)]
        return np.concatenate(passes)[start - first * size :][:count]

    def _pass(self, member: int, number: int, size: int, seed: int, shuffle: bool) -> np.ndarray:
        if not shuffle:
            return np.arange(size)
        key = [seed % 2**64, PASSES + (member << 48) + number]
        return np.random.Generator(np.random.Philox(key=key)).permutation(size)

    def mean_tokens(self, lengths: np.ndarray) -> float:
        """Tokens of an epoch, on average over many."""
        parts = np.split(lengths, np.cumsum(self.sizes)[:-1])
        return float(sum(part.mean() * count for part, count in zip(parts, self.counts)))

    def in_words(self) -> str:
        """`a: 700 of 700 samples, b: 300 of 2,000 (0.15 epochs)`."""
        return ", ".join(_share(*member) for member in zip(self.names, self.counts, self.sizes))

    def describe(self) -> list:
        """For the loader's state: what a position in the data depends on."""
        return [list(self.sizes), list(self.weights)]


def _share(name: str, count: int, size: int) -> str:
    passes = "" if count == size else f" ({count / size:.2g} epochs)"
    return f"{name}: {count:,} of {size:,}{passes}" if count <= size else f"{name}: {count:,} from {size:,}{passes}"
