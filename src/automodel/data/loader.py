"""Feeding the engine: batches made ahead by worker processes, and a position that resumes exactly.

`StepLoader` is an endless stream of optimizer steps. What step number k holds is a pure function (order.py), so the
loader's whole state is the number of steps *consumed*: batches that workers made ahead are simply made again after a
resume. That number is also independent of how many workers there are. The state carries a description of the data and
of the batch geometry besides, because continuing at step 400 of other data would be silently wrong.

Underneath is torchdata's StatefulDataLoader with one item = one step: its samplers run in this process and hand whole
lists of sample numbers to the workers, which slice the memory-mapped store. Workers are forked and never touch the
GPU or the tokenizer. What they make travels as plain arrays, by value: each torch tensor would take a file descriptor
and a handshake, and seven of them cost the main process more than making the batch itself.

`EvalLoader` visits every sample once, longest first; `Batch.indices` says which samples a batch holds.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from automodel.config.errors import UserError
from automodel.data.batch import Batch, StepBatch
from automodel.data.bins import BinOrder
from automodel.data.deal import bins_of, documents_of
from automodel.data.mixture import Mixture
from automodel.data.order import StepOrder

DEFAULT_PREFETCH = 4  # items each worker makes ahead
Order = StepOrder | BinOrder
NEVER = 2**62  # snapshot interval: our state is a step number, torchdata's own snapshots would only cost time


class _Collated(Dataset):
    """Makes one item of the stream in a worker."""

    def __init__(self, collate: Callable[[Sequence[int]], Batch]):
        self.collate = collate

    def __getitem__(self, index) -> StepBatch | Batch | Shipped:
        item = self._make(index)
        return item if get_worker_info() is None else Shipped(_replaced(item, torch.Tensor, torch.Tensor.numpy))

    def _make(self, index) -> StepBatch | Batch:
        if isinstance(index, np.ndarray):
            return self.collate(index)
        epoch, step, steps, micro_batches = index
        return StepBatch(tuple(self.collate(chosen) for chosen in micro_batches), epoch, step, steps)


@dataclass(frozen=True)
class Shipped:
    """A batch on its way from a worker, with arrays for tensors."""

    item: Any

    def unpacked(self) -> Any:
        return _replaced(self.item, np.ndarray, torch.from_numpy)

    def pin_memory(self) -> Any:
        return self.unpacked().pin_memory()


def _replaced(item: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The batch with everything of one kind changed, also inside its micro-batches."""
    if isinstance(item, kind):
        return change(item)
    if isinstance(item, tuple):
        return tuple(_replaced(part, kind, change) for part in item)
    if is_dataclass(item) and not isinstance(item, type):
        return type(item)(**{f.name: _replaced(getattr(item, f.name), kind, change) for f in fields(item)})
    return item


class _StepSampler(Sampler):
    """Steps from a position on; to the end of its epoch, or for ever."""

    def __init__(self, order: Order, start: int, one_epoch: bool, own: Callable[[list[np.ndarray]], list[np.ndarray]]):
        self.order, self.start, self.one_epoch, self.own = order, start, one_epoch, own

    def __iter__(self):
        epoch, first = self.order.locate(self.start)
        while True:
            steps = self.order.steps_in(epoch)
            for step in range(first, steps):
                yield epoch, step, steps, self.own(self.order.micro_batches(epoch, step))
            epoch, first = epoch + 1, 0
            if self.one_epoch:
                return


class _ListSampler(Sampler):
    def __init__(self, items: Sequence[np.ndarray]):
        self.items = items

    def __iter__(self):
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def _dataloader(
    collate: Callable[[Sequence[int]], Batch], sampler: Sampler, num_workers: int, pin_memory: bool, prefetch: int
) -> StatefulDataLoader:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata calls it, nobody else
        return StatefulDataLoader(
            _Collated(collate),
            batch_size=None,  # one item is a whole step
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=_unchanged,
            pin_memory=pin_memory and torch.cuda.is_available(),
            prefetch_factor=prefetch if num_workers else None,
            multiprocessing_context=_worker_context() if num_workers else None,
            worker_init_fn=_leave_signals_to_the_main_process,
            snapshot_every_n_steps=NEVER,
            # Its own generator: seeding workers must not advance the one that dropout draws from.
            generator=torch.Generator().manual_seed(0),
        )


def _unchanged(item):
    return item


def _leave_signals_to_the_main_process(_worker: int) -> None:
    """Ctrl-C and SIGTERM often reach the whole process group. The main process then saves and stops; a worker that
    died first would make that look like a failure. Workers end when they are told to, or when their parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _worker_context():
    """Fork where the platform has it: a worker then starts in milliseconds, with the store already mapped."""
    return multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")


def _closing(iterator: Iterator) -> Iterator:
    """Unpacks what comes, and stops the workers at once when the consumer leaves, instead of whenever garbage is
    collected."""
    try:
        for item in iterator:
            yield item.unpacked() if isinstance(item, Shipped) else item
    finally:
        _stop_workers(iterator)


def _stop_workers(iterator: Iterator) -> None:
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


class StepLoader:
    """Optimizer steps, epoch after epoch, from its position on. The engine decides when to stop."""

    def __init__(
        self,
        collate: Callable[[Sequence[int]], Batch],
        *,
        lengths: np.ndarray,
        micro_batch_size: int,
        grad_acc_steps: int = 1,
        seed: int = 42,
        shuffle: bool = True,
        drop_last: bool = False,
        group_by_length: bool = False,
        packed_sequence_size: int = 0,
        mixture: Mixture | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool | None = None,
        prefetch_factor: int | None = None,
        rank: int = 0,
        ranks: int = 1,
    ):
        """With a `packed_sequence_size` a micro-batch is a bin of so many tokens, and a step has `grad_acc_steps` of
        them; `micro_batch_size` is then only the room that the collator has for documents. `grad_acc_steps` counts the
        micro-batches of a step over all `ranks`; this loader gives those of one `rank`."""
        self.collate = collate
        self.micro_batch_size, self.rank, self.ranks = micro_batch_size, rank, ranks
        self.order: Order
        if packed_sequence_size:
            self.order = BinOrder(
                lengths=np.asarray(lengths),
                size=packed_sequence_size,
                bins_per_step=grad_acc_steps,
                seed=seed,
                shuffle=shuffle,
                drop_last=drop_last,
                mixture=mixture,
            )
        else:
            self.order = StepOrder(
                lengths=np.asarray(lengths),
                micro_batch_size=micro_batch_size,
                grad_acc_steps=grad_acc_steps,
                seed=seed,
                shuffle=shuffle,
                drop_last=drop_last,
                group_by_length=group_by_length,
                sort_within_step=bool(getattr(collate, "pads", False)),
                mixture=mixture,
            )
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers is not False
        self.prefetch_factor = prefetch_factor or DEFAULT_PREFETCH
        self.consumed = 0
        """Steps handed out so far, over all epochs."""
        self._started: Iterator | None = None

    def __len__(self) -> int:
        """Steps per epoch (of the first one, where epochs differ)."""
        return self.order.steps_per_epoch

    @property
    def epoch(self) -> float:
        """Epochs consumed, as a fraction."""
        epoch, step = self.order.locate(self.consumed)
        return epoch + step / self.order.steps_in(epoch)

    def start(self) -> None:
        """Starts the workers, if there are any: they make the first batches while their consumer is still busy."""
        if self.num_workers and self._started is None:
            self._started = self._stream()
            atexit.register(self.stop)  # should an error end the process first: it would wait for them for ever

    def stop(self) -> None:
        """Ends workers that were started and whose batches nobody wants."""
        started = self._take_started()
        if started is not None:
            _stop_workers(started)

    def _take_started(self) -> Iterator | None:
        started, self._started = self._started, None
        if started is not None:
            atexit.unregister(self.stop)
        return started

    def __iter__(self) -> Iterator[StepBatch]:
        while True:
            started = self._take_started()
            for step in _closing(self._stream() if started is None else started):
                self.consumed += 1
                yield step

    def _stream(self) -> Iterator[StepBatch]:
        """Steps from the position on; workers are already at it."""
        # Workers that may not outlive an epoch get a stream that ends with it, and new ones take over.
        one_epoch = self.num_workers > 0 and not self.persistent_workers
        sampler = _StepSampler(self.order, self.consumed, one_epoch, self.own)
        return iter(_dataloader(self.collate, sampler, self.num_workers, self.pin_memory, self.prefetch_factor))

    def own(self, micro_batches: list[np.ndarray]) -> list[np.ndarray]:
        """What this rank trains on, of the micro-batches of a whole step."""
        if self.ranks == 1:
            return micro_batches
        if isinstance(self.order, BinOrder):
            return bins_of(self.rank, self.ranks, micro_batches, self.order.lengths)
        return documents_of(self.rank, self.ranks, micro_batches, self.order.lengths, self.micro_batch_size)

    def describe(self) -> dict[str, Any]:
        """What a position is only valid for. Not for a number of ranks: a step has the same documents on any."""
        lengths = self.order.lengths
        return {"samples": len(lengths), "data": _identity(self.collate, lengths), **self.order.describe()}

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed, "describes": self.describe()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last consumed step. Refuses a state of other data or another batch geometry."""
        saved, current = state["describes"], self.describe()
        store = getattr(self.collate, "store", None)
        if store is not None and store.is_that_of(str(saved.get("data"))):
            saved = {**saved, "data": current["data"]}
        changed = [
            f"{_SAID[key]}: {saved.get(key)} → {current[key]}" for key in current if saved.get(key) != current[key]
        ]
        if changed:
            raise UserError(
                "The run cannot be resumed, because its data or batches changed since the checkpoint: "
                + "; ".join(changed)
                + ". Put the old settings back, or start a new run in another checkpoint_dir."
            )
        self.stop()
        self.consumed = int(state["consumed"])


_SAID = {
    "samples": "number of samples",
    "data": "content of the tokenised data",
    "micro_batch_size": "batch size",
    "grad_acc_steps": "accumulation steps over all ranks",
    "seed": "seed",
    "shuffle": "dataloader.shuffle",
    "drop_last": "dataloader.drop_last",
    "group_by_length": "dataloader.group_by_length",
    "packed_sequence_size": "packed_sequence.packed_sequence_size",
    "mixture": "sizes and weights of dataset.mixture",
}


def _identity(collate: Callable, lengths: np.ndarray) -> str:
    """A hash of the samples; of their lengths alone where there is no store."""
    store = getattr(collate, "store", None)
    if store is not None and store.content:
        return store.content
    return hashlib.blake2b(np.ascontiguousarray(lengths, dtype=np.int64).data, digest_size=8).hexdigest()


def _batch_starts(lengths: np.ndarray, batch_size: int, most_tokens: int | None) -> list[int]:
    """Where batches begin: each takes samples until it is full, by count or by tokens."""
    if most_tokens is None:
        return list(range(0, len(lengths), batch_size))
    ends = np.cumsum(lengths)
    starts, start = [], 0
    while start < len(lengths):
        starts.append(start)
        before = int(ends[start - 1]) if start else 0
        fitting = int(np.searchsorted(ends, before + most_tokens, side="right"))
        start = max(start + 1, min(fitting, start + batch_size))  # a single sample may be longer: it is alone then
    return starts


class EvalLoader:
    """Every sample once, sorted by length, longest first: little padding, and memory trouble shows at once. With
    `most_tokens`, batches end before they would hold more."""

    def __init__(
        self,
        collate: Callable[[Sequence[int]], Batch],
        *,
        lengths: np.ndarray,
        batch_size: int,
        most_tokens: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
    ):
        self.collate = collate
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.prefetch_factor = prefetch_factor or DEFAULT_PREFETCH
        lengths = np.asarray(lengths)
        order = np.argsort(-lengths, kind="stable")
        starts = _batch_starts(lengths[order], batch_size, most_tokens)
        self.batches = [order[start:end] for start, end in zip(starts, [*starts[1:], len(order)])]

    def share(self, own: int, of: int) -> tuple[EvalLoader, int]:
        """Every `of`-th batch from `own` on, and how many those are. Where others have one more, the first of all comes
        once more: ranks that hold parts of one model run equally often."""
        part = copy.copy(self)
        part.batches = self.batches[own::of]
        mine = len(part.batches)
        if mine < -(-len(self.batches) // of):
            part.batches = [*part.batches, self.batches[0]]
        return part, mine

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        sampler = _ListSampler(self.batches)
        loader = _dataloader(self.collate, sampler, self.num_workers, self.pin_memory, self.prefetch_factor)
        yield from _closing(iter(loader))
