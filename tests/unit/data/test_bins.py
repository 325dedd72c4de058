"""Packing by size: every document once an epoch, full bins, an order that resumes, one shape for every bin."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from automodel.config.errors import UserError
from automodel.data.bins import BinOrder, _best_fit, pack
from automodel.data.collate import PackedCollator
from automodel.data.loader import EvalLoader, StepLoader


def lognormal(count: int, seed: int = 0, mean: float = 5.0, spread: float = 0.8, longest: int = 2048) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(mean, spread, count)
    return np.clip(drawn.astype(np.int64), 4, longest)


def bins_of(order: BinOrder, epoch: int) -> list[np.ndarray]:
    return [b for step in range(order.steps_in(epoch)) for b in order.micro_batches(epoch, step)]


@pytest.mark.parametrize("seed", range(12))
def test_every_document_exactly_once_an_epoch_and_no_bin_too_large(seed):
    random = np.random.default_rng(seed)
    longest = int(random.integers(3, 400))
    lengths = random.integers(1, longest + 1, int(random.integers(1, 1500)))
    size = int(random.integers(longest, 4 * longest))
    order = BinOrder(lengths, size, bins_per_step=int(random.integers(1, 5)), seed=seed, shuffle=bool(seed % 4))
    for epoch in range(3):
        bins = bins_of(order, epoch)
        assert sorted(np.concatenate(bins).tolist()) == list(range(len(lengths)))
        assert all(0 < lengths[b].sum() <= size for b in bins)
        assert max(map(len, bins)) <= order.most_documents


@pytest.mark.parametrize(
    ("mean", "spread", "size"),
    [(5.0, 0.8, 4096), (5.0, 0.8, 2048), (6.0, 1.0, 4096), (4.0, 0.5, 8192), (6.5, 0.6, 2048)],
)
def test_bins_of_lognormal_lengths_are_full(mean, spread, size):
    lengths = lognormal(20_000, mean=mean, spread=spread)
    for epoch in range(2):
        order = BinOrder(lengths, size)
        assert order.packing(epoch).fill(lengths, size) > 0.97


def test_packing_by_hand():
    lengths = np.asarray([2, 6, 3, 4, 5, 5, 1])
    spread = pack(np.arange(7), lengths, size=10, most=7)
    assert [lengths[b].tolist() for b in spread] == [[6, 2, 1], [5, 4], [5, 3]]  # the emptiest bin each time
    few = pack(np.arange(7), lengths, size=10, most=2)
    assert [lengths[b].tolist() for b in few] == [[6, 2], [5, 4], [5, 3], [1]]
    tight = np.asarray([6, 4, 6, 4, 6, 4])  # spreading would pair 6 with 4 as well, but three sixes need three bins
    assert [lengths_of.tolist() for lengths_of in (tight[b] for b in pack(np.arange(6), tight, 10, 6))] == [[6, 4]] * 3


def test_hardly_more_bins_than_best_fit_decreasing():
    random = np.random.default_rng(0)
    for _ in range(30):
        longest = int(random.integers(5, 100))
        lengths = np.sort(random.integers(1, longest + 1, 200))[::-1]
        tight = len(set(_best_fit(lengths.tolist(), {}, [], 100, 200)))
        assert len(pack(np.arange(200), lengths, 100, 200)) <= 1.02 * tight


def test_bins_hold_long_and_short_documents_alike():
    lengths = lognormal(20_000)
    counts = np.diff(BinOrder(lengths, 4096).packing(0).offsets)
    assert counts.std() < 0.15 * counts.mean()  # best fit alone: 0.83
    assert counts.max() < 1.8 * counts.mean()


def test_the_order_is_a_function_of_seed_and_epoch():
    lengths = lognormal(3000)
    one, same, other = BinOrder(lengths, 4096), BinOrder(lengths, 4096), BinOrder(lengths, 4096, seed=43)
    far = [b.tolist() for b in bins_of(one, 2)]
    assert [b.tolist() for b in bins_of(one, 0)] == [b.tolist() for b in bins_of(same, 0)]
    assert far == [b.tolist() for b in bins_of(same, 2)]  # whether or not the epochs before it were asked for
    assert [b.tolist() for b in bins_of(other, 0)] != [b.tolist() for b in bins_of(one, 0)]
    company = [{frozenset(b.tolist()) for b in bins_of(one, epoch)} for epoch in range(2)]
    assert len(company[0] & company[1]) < 0.02 * len(company[0])  # other documents share a bin in the next epoch


def test_positions_count_the_steps_of_epochs_that_differ():
    order = BinOrder(lognormal(2000, mean=6.0, spread=1.0), 4096, bins_per_step=1)
    steps = [order.steps_in(epoch) for epoch in range(6)]
    assert len(set(steps)) > 1  # otherwise this shows nothing: take other lengths
    every = [(epoch, step) for epoch, count in enumerate(steps) for step in range(count)]
    assert [order.locate(position) for position in range(len(every))] == every


def loader_of(store, workers: int = 0, **changes) -> StepLoader:
    settings = {"grad_acc_steps": 3, "seed": 5, "packed_sequence_size": 64, **changes}
    order = BinOrder(store.lengths, 64, 3, seed=settings["seed"])
    collate = PackedCollator(
        store, "next_token", bucket_tokens=64, bucket_reads=8, max_seqlen=17, micro_batch_size=order.most_documents
    )
    return StepLoader(collate, lengths=store.lengths, micro_batch_size=1, num_workers=workers, **settings)


def seen(steps) -> list:
    return [(s.epoch, s.step_in_epoch, [b.indices for b in s.micro_batches]) for s in steps]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("consumed", [3, 11, 25])
def test_resume_in_the_middle_of_an_epoch(store_of, workers, consumed):
    store = store_of("causal-lm", count=130)
    whole = list(itertools.islice(iter(loader_of(store)), 30))
    first = loader_of(store, workers)
    stream = iter(first)
    for _ in range(consumed):
        next(stream)
    state = json.loads(json.dumps(first.state_dict()))  # as a checkpoint keeps it
    stream.close()
    second = loader_of(store)
    second.load_state_dict(state)
    assert seen(itertools.islice(iter(second), 30 - consumed)) == seen(whole[consumed:])
    assert whole[-1].epochs_done == pytest.approx(second.epoch)


def test_resume_with_another_size_is_refused(store_of):
    store = store_of("causal-lm", count=50)
    state = loader_of(store).state_dict()
    with pytest.raises(UserError, match=r"packed_sequence\.packed_sequence_size: 64 → 128"):
        loader_of(store, packed_sequence_size=128).load_state_dict(state)


def test_bins_have_one_shape(store_of):
    store = store_of("text-classification", count=200)
    order = BinOrder(store.lengths, 64)
    collate = PackedCollator(store, "document", bucket_tokens=64, max_seqlen=17, micro_batch_size=order.most_documents)
    shapes = set()
    for epoch in range(3):
        for chosen in bins_of(order, epoch):
            batch = collate(chosen)
            tensors = (batch.input_ids_T, batch.cu_seqlens_D, batch.read_positions_R, batch.labels_R)
            shapes.add(tuple(t.shape for t in tensors))
            assert batch.num_documents == batch.num_labels == len(chosen)
    assert len(shapes) == 1
    assert next(iter(shapes))[0] == (64,)


def test_a_document_longer_than_a_bin_is_never_cut():
    with pytest.raises(UserError) as caught:
        BinOrder(np.asarray([10, 700, 900]), 512)
    assert str(caught.value) == (
        "packed_sequence.packed_sequence_size is 512, but 2 of 3 samples are longer (the longest has 900 tokens), and "
        "a document is never cut to fit into a bin. Set dataset.max_length to 512 or less to cut them on purpose, or "
        "packed_sequence_size to 900 or more."
    )


def test_drop_last_drops_a_smaller_step_and_never_everything():
    lengths = np.full(10, 30)
    order = BinOrder(lengths, 60, bins_per_step=3, drop_last=True)
    assert order.steps_in(0) == 1
    assert [len(b) for b in bins_of(order, 0)] == [2, 2, 2]
    with pytest.raises(UserError, match=r"fills 5 bins of 60 tokens and one optimizer step takes 6"):
        BinOrder(lengths, 60, bins_per_step=6, drop_last=True)


def test_evaluation_batches_keep_to_the_tokens_of_a_bin(store_of):
    store = store_of("text-classification", count=60)
    collate = PackedCollator(store, "document", micro_batch_size=8)
    loader = EvalLoader(collate, lengths=store.lengths, batch_size=8, most_tokens=40)
    batches = list(loader)
    assert sorted(i for b in batches for i in b.indices) == list(range(60))
    assert all(b.num_tokens <= 40 and b.num_documents <= 8 for b in batches)
    assert max(b.num_documents for b in batches) == 8
    alone = EvalLoader(collate, lengths=store.lengths, batch_size=8, most_tokens=10)
    assert sorted(i for b in alone for i in b.indices) == list(range(60))  # longer ones come alone
