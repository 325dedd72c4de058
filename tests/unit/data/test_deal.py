"""Documents dealt to ranks: all of them, once, in equal numbers, by cost."""

from __future__ import annotations

import time
from itertools import chain

import numpy as np
import pytest

from automodel.data.collate import PackedCollator
from automodel.data.deal import bins_of, costs_of, deal, documents_of
from automodel.data.loader import StepLoader


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 3, 8, 31, 64])
def test_every_item_goes_to_one_rank_and_hands_differ_by_one(ranks, count):
    costs = np.random.default_rng(count).lognormal(4, 1, count)
    hands = deal(costs, ranks)
    assert sorted(item for hand in hands for item in hand) == list(range(count))
    sizes = [len(hand) for hand in hands]
    assert max(sizes) - min(sizes) <= 1
    assert all(hand == sorted(hand) for hand in hands)


def dealt_one_by_one(costs: np.ndarray, ranks: int) -> list[list[int]]:
    """As the docstring says it, looking at every rank for every item. Runs that go on must be dealt the same."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    room = -(-len(costs) // ranks)
    full = ranks - (room * ranks - len(costs))
    for item in np.argsort(-costs, kind="stable").tolist():
        limit = room - 1 if sum(len(hand) == room for hand in hands) >= full else room
        taker = min((r for r in range(ranks) if len(hands[r]) < limit), key=lambda r: (loads[r], r))
        hands[taker].append(item)
        loads[taker] += float(costs[item])
    return [sorted(hand) for hand in hands]


def test_the_least_loaded_rank_with_room_takes_the_next():
    chance = np.random.default_rng(0)
    for _ in range(200):
        ranks, count = int(chance.integers(1, 9)), int(chance.integers(0, 40))
        costs = costs_of(chance.integers(1, int(chance.integers(2, 300)), count))  # with equal ones
        assert deal(costs, ranks) == dealt_one_by_one(costs, ranks)


def test_a_thousand_ranks_do_not_wait_for_it():
    """In every step, on every rank: two seconds where each document looks at each rank."""
    costs = costs_of(np.random.default_rng(0).integers(10, 2000, 8192))
    begun = time.process_time()
    deal(costs, 1024)
    assert time.process_time() - begun < 0.5


def test_hands_cost_almost_the_same():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.8, 256), 8, 2048).astype(np.int64)
    costs = costs_of(lengths)
    dealt = [costs[hand].sum() for hand in deal(costs, 8)]
    in_order = [costs[start : start + 32].sum() for start in range(0, 256, 32)]
    assert max(dealt) / np.mean(dealt) < 1.01
    assert max(in_order) / np.mean(in_order) > 1.1  # what dealing by number alone would cost


def test_attention_counts():
    """One long document costs more than the same tokens in short ones."""
    assert costs_of(np.array([4096]))[0] > costs_of(np.full(32, 128)).sum() * 1.5


@pytest.mark.parametrize("ranks", [2, 4])
def test_micro_batches_of_all_ranks_are_those_of_the_step(ranks):
    lengths = np.arange(1, 40)
    step = [np.arange(start, min(start + 4, 30)) for start in range(0, 30, 4)]
    shares = [documents_of(rank, ranks, step, lengths, 4) for rank in range(ranks)]
    assert sorted(np.concatenate([np.concatenate(share) for share in shares]).tolist()) == list(range(30))
    assert all(len(micro) <= 4 for share in shares for micro in share)


def test_a_rank_may_go_without():
    lengths = np.array([5, 6])
    shares = [documents_of(rank, 4, [np.array([0, 1])], lengths, 2) for rank in range(4)]
    assert [len(share) for share in shares] == [1, 1, 0, 0]


def test_bins_stay_whole():
    lengths = np.array([10, 20, 30, 40, 5])
    bins = [np.array([0, 1]), np.array([2]), np.array([3]), np.array([4])]
    shares = [bins_of(rank, 2, bins, lengths) for rank in range(2)]
    assert [[b.tolist() for b in share] for share in shares] == [[[3], [4]], [[0, 1], [2]]]


@pytest.mark.parametrize("packed_sequence_size", [0, 64])
def test_the_loader_gives_each_rank_its_part_and_resumes_on_any_number(store_of, packed_sequence_size):
    store = store_of("text-classification", count=43)

    def loader(rank, ranks):
        collate = PackedCollator(store, "document", micro_batch_size=43 if packed_sequence_size else 2)
        return StepLoader(
            collate, lengths=store.lengths, micro_batch_size=2, grad_acc_steps=4, seed=3, rank=rank, ranks=ranks,
            packed_sequence_size=packed_sequence_size,
        )  # fmt: skip

    def steps(rank, ranks, state=None):
        made = loader(rank, ranks)
        if state:
            made.load_state_dict(state)
        return [
            sorted(i for b in batch.micro_batches for i in b.indices) for _, batch in zip(range(7), made, strict=False)
        ], made.state_dict()

    alone, state = steps(0, 1)
    for ranks in (2, 4):
        parts = [steps(rank, ranks) for rank in range(ranks)]
        assert [sorted(chain(*each)) for each in zip(*(part for part, _ in parts))] == alone
        assert all(described == state for _, described in parts)
        after = [steps(rank, ranks, state)[0] for rank in range(ranks)]
        assert [sorted(chain(*each)) for each in zip(*after)] == steps(0, 1, state)[0]
