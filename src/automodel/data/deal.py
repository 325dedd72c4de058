"""Which rank trains on which documents of a step.

The documents of an optimizer step are the same whatever the number of ranks (order.py); here they are dealt out, by a
pure function of their lengths, so that every rank knows its hand without asking. The work of a document of L tokens is
L for its products with weights and L² / (6 · width) for its attention (24 · width² · L and 4 · width · L² operations
in each layer). The costliest document goes first, each to the rank that has the least to do and still has room.

Every rank gets as many documents as any other, or one less: that is what its micro-batches have slots for. A step with
fewer documents than ranks leaves some without, and they train on nothing that time. Packed by size, whole bins are
dealt in the same way.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

WIDTH = 1024
"""Hidden size that the costs are made for. Half or twice of it deals almost the same hands."""


def costs_of(lengths: np.ndarray) -> np.ndarray:
    """The work of each document, in tokens."""
    lengths = np.asarray(lengths, dtype=np.float64)
    return lengths + lengths**2 / (6 * WIDTH)


def deal(costs: Sequence[float] | np.ndarray, ranks: int) -> list[list[int]]:
    """Positions of the items of each rank, in the order they came in; no rank has two more than another."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    costs = np.asarray(costs, dtype=np.float64)
    room = -(-len(costs) // ranks)
    full = ranks - (room * ranks - len(costs))  # ranks that may take `room`; the others take one less
    # In a heap: looking at every rank for every document, a thousand ranks would wait two seconds for each step.
    takers = [(0.0, rank) for rank in range(ranks)]
    for item in np.argsort(-costs, kind="stable").tolist():
        load, rank = heapq.heappop(takers)
        while len(hands[rank]) >= (room if full else room - 1):  # it has enough, now and later
            load, rank = heapq.heappop(takers)
        hands[rank].append(item)
        full -= len(hands[rank]) == room
        heapq.heappush(takers, (load + float(costs[item]), rank))
    return [sorted(hand) for hand in hands]


def documents_of(
    rank: int, ranks: int, micro_batches: Sequence[np.ndarray], lengths: np.ndarray, micro_batch_size: int
) -> list[np.ndarray]:
    """A rank's own micro-batches of a step that counts documents."""
    step = np.concatenate(micro_batches)
    mine = step[deal(costs_of(lengths[step]), ranks)[rank]]
    return [mine[start : start + micro_batch_size] for start in range(0, len(mine), micro_batch_size)]


def bins_of(rank: int, ranks: int, bins: Sequence[np.ndarray], lengths: np.ndarray) -> list[np.ndarray]:
    """A rank's own bins of a step that counts tokens."""
    costs = [float(costs_of(lengths[documents]).sum()) for documents in bins]
    return [bins[number] for number in deal(costs, ranks)[rank]]
