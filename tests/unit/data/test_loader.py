"""Steps: what they hold, that workers change nothing, and that a position resumes exactly."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from automodel.config.errors import UserError
from automodel.data.collate import PackedCollator, PaddedCollator
from automodel.data.loader import EvalLoader, StepLoader


def make_loader(store, padded: bool = False, **changes) -> StepLoader:
    settings = {"micro_batch_size": 4, "grad_acc_steps": 2, "seed": 7, **changes}
    if padded:
        collate = PaddedCollator(store, "document", pad_token_id=0)
    else:
        collate = PackedCollator(store, "document", micro_batch_size=settings["micro_batch_size"])
    return StepLoader(collate, lengths=store.lengths, **settings)


def take(loader, count: int) -> list:
    return list(itertools.islice(iter(loader), count))


def seen(steps) -> list[tuple]:
    return [(s.epoch, s.step_in_epoch, tuple(b.indices for b in s.micro_batches)) for s in steps]


def same(left, right) -> bool:
    for a, b in zip(left.micro_batches, right.micro_batches, strict=True):
        for name, value in vars(a).items():
            other = getattr(b, name)
            if not (torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other):
                return False
    return True


def test_an_epoch_holds_every_sample_once(store_of):
    loader = make_loader(store_of("text-classification", count=23))
    assert len(loader) == 3
    steps = take(loader, 6)
    for epoch in (0, 1):
        part = [s for s in steps if s.epoch == epoch]
        assert [s.step_in_epoch for s in part] == [0, 1, 2]
        indices = [i for s in part for b in s.micro_batches for i in b.indices]
        assert sorted(indices) == list(range(23))
    assert [s.num_documents for s in steps[:3]] == [8, 8, 7]
    assert [len(s.micro_batches) for s in steps[:3]] == [2, 2, 2]
    assert seen(steps[:1])[0][2] != seen(steps[3:4])[0][2]  # another order in the next epoch


def test_drop_last(store_of):
    loader = make_loader(store_of("text-classification", count=23), drop_last=True)
    assert len(loader) == 2
    assert [s.num_documents for s in take(loader, 4)] == [8, 8, 8, 8]


def test_drop_last_with_too_little_data_is_refused(store_of):
    with pytest.raises(UserError, match="leaves none"):
        make_loader(store_of("text-classification", count=5), drop_last=True)


def test_step_samples_do_not_depend_on_how_the_step_is_split(store_of):
    store = store_of("text-classification", count=40)
    sets = []
    for micro, accumulation in ((8, 1), (4, 2), (1, 8)):
        steps = take(make_loader(store, micro_batch_size=micro, grad_acc_steps=accumulation), 5)
        sets.append([[i for b in s.micro_batches for i in b.indices] for s in steps])
    assert sets[0] == sets[1] == sets[2]


def test_no_shuffle_is_the_order_of_the_data(store_of):
    steps = take(make_loader(store_of("text-classification", count=20), shuffle=False), 3)
    assert [i for s in steps for b in s.micro_batches for i in b.indices] == list(range(20))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_any_number_of_workers_gives_the_same_batches(store_of, workers, padded):
    store = store_of("text-classification", count=50)
    alone = take(make_loader(store, padded), 15)
    helped = take(make_loader(store, padded, num_workers=workers, prefetch_factor=2), 15)
    assert seen(alone) == seen(helped)
    assert all(same(a, b) for a, b in zip(alone, helped))


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 0), (0, 3), (2, 1)])
def test_resume_continues_after_the_last_consumed_step(store_of, before, after):
    store = store_of("text-classification", count=50)
    whole = take(make_loader(store), 20)
    first = make_loader(store, num_workers=before)
    stream = iter(first)
    for _ in range(9):  # crosses an epoch of 7 steps; workers are several steps ahead by now
        next(stream)
    state = first.state_dict()
    stream.close()
    second = make_loader(store, num_workers=after)
    second.load_state_dict(state)
    assert seen(take(second, 11)) == seen(whole[9:])
    assert second.consumed == 20


def test_resume_on_changed_data_says_what_changed(store_of):
    state = make_loader(store_of("text-classification", count=50)).state_dict()
    with pytest.raises(UserError, match=r"number of samples: 50 → 49; content of the tokenised data"):
        make_loader(store_of("text-classification", count=49)).load_state_dict(state)
    with pytest.raises(UserError, match=r"content of the tokenised data: .* → .*\. Put the old settings back"):
        make_loader(store_of("text-classification", count=50, seed=1)).load_state_dict(state)
    with pytest.raises(UserError, match=r"batch size: 4 → 2; seed: 7 → 8\."):
        make_loader(store_of("text-classification", count=50), micro_batch_size=2, seed=8).load_state_dict(state)


def test_padded_steps_are_sorted_by_length_before_they_are_split(store_of):
    store = store_of("text-classification", count=48)
    for step in take(make_loader(store, padded=True), 6):
        lengths = [int(store.lengths[i]) for b in step.micro_batches for i in b.indices]
        assert lengths == sorted(lengths, reverse=True)
    packed = [store.lengths[i] for s in take(make_loader(store), 1) for b in s.micro_batches for i in b.indices]
    assert packed != sorted(packed, reverse=True)


def test_group_by_length_saves_padding_and_keeps_every_sample(store_of):
    store = store_of("text-classification", count=400, longest=60)

    def padding(group: bool) -> int:
        loader = make_loader(store, padded=True, grad_acc_steps=1, group_by_length=group)
        steps = take(loader, len(loader))
        assert sorted(i for s in steps for b in s.micro_batches for i in b.indices) == list(range(400))
        return sum(b.input_ids_BS.numel() - b.num_tokens for s in steps for b in s.micro_batches)

    assert padding(True) < 0.5 * padding(False)
    first = take(make_loader(store, padded=True, grad_acc_steps=1, group_by_length=True), 1)[0]
    assert first.micro_batches[0].input_ids_BS.shape[1] == store.lengths.max()


def test_workers_end_with_the_iterator(store_of):
    loader = make_loader(store_of("text-classification", count=50), num_workers=2)
    stream = iter(loader)
    next(stream)
    workers = multiprocessing.active_children()
    assert len(workers) >= 2
    del stream
    deadline = time.monotonic() + 10
    while any(w.is_alive() for w in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(w.is_alive() for w in workers)


def test_a_signal_to_the_whole_group_does_not_break_the_stream(store_of):
    loader = make_loader(store_of("text-classification", count=50), num_workers=1)
    stream = iter(loader)
    next(stream)
    workers = multiprocessing.active_children()
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGTERM)
    time.sleep(0.2)
    steps = [next(stream) for _ in range(20)]
    assert steps[-1].epoch == 2
    stream.close()
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_start_early_make_the_same_steps(store_of, workers):
    store = store_of("text-classification", count=23)
    expected = take(make_loader(store), 7)
    loader = make_loader(store, num_workers=workers)
    loader.start()
    assert len(multiprocessing.active_children()) == workers
    assert all(itertools.starmap(same, zip(take(loader, 4), expected, strict=False)))
    loader.start()  # again, for the rest
    assert all(itertools.starmap(same, zip(take(loader, 3), expected[4:], strict=True)))
    assert not multiprocessing.active_children()


def test_workers_that_started_early_are_ended_by_another_position(store_of):
    store = store_of("text-classification", count=23)
    loader = make_loader(store, num_workers=2)
    loader.start()
    loader.load_state_dict({"consumed": 3, "describes": loader.describe()})
    assert not multiprocessing.active_children()
    assert seen(take(loader, 2)) == seen(take(make_loader(store), 5)[3:])


def test_a_process_that_fails_before_the_first_step_still_ends():
    code = (
        "import numpy as np\n"
        "from automodel.data.loader import StepLoader\n"
        "loader = StepLoader(list, lengths=np.ones(8), micro_batch_size=2, num_workers=1)\n"
        "loader.start()\n"
        "raise SystemExit(5)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 5


def test_workers_that_may_not_persist_are_replaced_each_epoch(store_of):
    store = store_of("text-classification", count=20)
    loader = make_loader(store, num_workers=1, persistent_workers=False)
    stream, processes = iter(loader), []
    for _ in range(2 * len(loader)):
        next(stream)
        processes.append({w.pid for w in multiprocessing.active_children()})
    stream.close()
    assert processes[0].isdisjoint(processes[-1])
    assert seen(take(make_loader(store), 6)) == seen(
        take(make_loader(store, num_workers=1, persistent_workers=False), 6)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_eval_visits_every_sample_once_longest_first(store_of, workers):
    store = store_of("text-classification", count=23)
    collate = PackedCollator(store, "document", micro_batch_size=4)
    loader = EvalLoader(collate, lengths=store.lengths, batch_size=4, num_workers=workers)
    for _ in range(2):  # an evaluation loader is used again and again
        batches = list(loader)
        assert len(batches) == len(loader) == 6
        indices = [i for b in batches for i in b.indices]
        assert sorted(indices) == list(range(23))
        assert (np.diff(store.lengths[indices]) <= 0).all()


@pytest.mark.parametrize("workers", [0, 1])
def test_iterating_leaves_the_random_state_alone(store_of, workers):
    store = store_of("text-classification", count=23)
    before = torch.get_rng_state()
    take(make_loader(store, num_workers=workers), 5)
    list(EvalLoader(make_loader(store).collate, lengths=store.lengths, batch_size=4, num_workers=workers))
    assert torch.equal(torch.get_rng_state(), before)
