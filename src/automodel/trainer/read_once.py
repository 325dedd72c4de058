"""Datasets that are classes of the script's own, read once where that is safe.

    class Reviews(torch.utils.data.Dataset):
        def __getitem__(self, i): return {k: torch.tensor(v[i]) for k, v in self.encodings.items()}

Such a class may do anything, but most look rows up. It is taken for one that does if a few rows, read twice, are equal,
and neither a generator of random numbers nor an attribute of it has moved meanwhile; if it has no idea of epochs and no
generator of its own; and if the run reads every row anyway and reading them takes seconds. All rows are then read
before the first step instead of along the way. A callback may still turn a page of it (a curriculum), so a few rows are
looked at again when an epoch begins, and all are read anew where it has changed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from automodel.checkpoint import randomness
from automodel.trainer.stored_rows import NotStored

TRIED = 8
PATIENCE_S = 30.0


def samples_taken(args: Any, dataset: Any) -> int:
    """How many rows a run will read, with those that it reads again."""
    if args.max_steps > 0:
        return args.max_steps * args.train_batch_size * args.gradient_accumulation_steps
    return int(args.num_train_epochs * len(dataset)) if hasattr(dataset, "__len__") else 0


class ReadOnce:
    """The rows of a map-style dataset. `samples`: how many the run will take. Raises `NotStored`."""

    def __init__(self, dataset: Any, samples: int):
        name = type(dataset).__name__
        if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise NotStored(f"{name} may compute its rows anew each time")
        try:
            count = len(dataset)
        except (TypeError, NotImplementedError) as error:
            raise NotStored(f"{name} has no length") from error
        if count == 0 or hasattr(dataset, "set_epoch"):
            raise NotStored(f"{name} is empty, or changes from epoch to epoch")
        if samples < count:
            raise NotStored(f"the run takes {samples:,} of the {count:,} rows of {name}")
        if any(_has_generator(part) for part in _parts(dataset)):  # before a row is read: that would move it
            raise NotStored(f"{name} has a generator of random numbers")
        self.dataset = dataset
        with _nothing_drawn():
            _check_same_again(dataset, count, name)
        self.rows = self._read()

    def again(self) -> bool:
        """Whether the dataset gives other rows than before; then they are read anew."""
        with _nothing_drawn():
            same = len(self.dataset) == len(self.rows) and _state(self.dataset) == self.state
            same = same and all(_equal(self.rows[index], self.dataset[index]) for index in _a_few(len(self.rows)))
        if not same:
            self.rows = self._read()
        return not same

    def _read(self) -> list[dict[str, Any]]:
        rows = [dict(self.dataset[index]) for index in range(len(self.dataset))]
        self.state = _state(self.dataset)
        return rows


@contextmanager
def _nothing_drawn() -> Generator[None]:
    """Whoever draws afterwards will draw what he would have drawn."""
    tensors, values = randomness.capture()
    try:
        yield
    finally:
        randomness.restore(tensors, values)


def _parts(dataset: Any, seen: tuple[int, ...] = ()) -> Iterator[Any]:
    """A dataset and those it is made of (`Subset`, `ConcatDataset`, a wrapper of somebody's)."""
    yield dataset
    for value in getattr(dataset, "__dict__", {}).values():
        inner = value if isinstance(value, list | tuple) else [value]
        if not inner or not isinstance(inner[0], torch.utils.data.Dataset):  # most lists are the rows, and long
            continue
        for part in inner:
            if id(part) not in seen:  # one may know who holds it
                yield from _parts(part, (*seen, id(dataset)))


def _has_generator(dataset: Any) -> bool:
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    return any(isinstance(value, kinds) for value in getattr(dataset, "__dict__", {}).values())


def _state(dataset: Any) -> list[dict[str, Any]]:
    """What a dataset could be told to give other rows: its plain attributes, and which objects the others are."""
    plain = (int, float, str, bool, type(None))
    return [
        {name: value if isinstance(value, plain) else id(value) for name, value in vars(part).items()}
        for part in _parts(dataset)
        if hasattr(part, "__dict__")
    ]


def _a_few(count: int) -> list[int]:
    return np.linspace(0, count - 1, min(count, TRIED)).astype(int).tolist()


def _check_same_again(dataset: Any, count: int, name: str) -> None:
    """A few rows, twice, with all generators watched; and how long all of them would take."""
    chosen = _a_few(count)
    before, start = (_generators(), _state(dataset)), time.perf_counter()
    once = [dataset[index] for index in chosen]
    seconds = (time.perf_counter() - start) / len(chosen) * count
    again = [dataset[index] for index in chosen]
    if not all(isinstance(row, dict) or hasattr(row, "keys") for row in once):
        raise NotStored(f"rows of {name} are not dictionaries")
    if (_generators(), _state(dataset)) != before or not all(_equal(a, b) for a, b in zip(once, again)):
        raise NotStored(f"{name} computes its rows anew each time")
    if seconds > PATIENCE_S:
        raise NotStored(f"reading all {count:,} rows of {name} first would take {seconds:.0f} s")


def _generators() -> tuple[Any, ...]:
    own: Any = np.random.get_state()
    return random.getstate(), own[0], own[1].tobytes(), *own[2:], torch.get_rng_state().numpy().tobytes()


def _equal(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(np.array_equal(np.asarray(a[key]), np.asarray(b[key])) for key in a)
