"""Datasets that are classes of the script's own, read once where that is safe.

    class Reviews(torch.utils.data.Dataset):
        def __getitem__(self, i): return {k: torch.tensor(v[i]) for k, v in self.encodings.items()}

Such a class may do anything, but most look rows up. It is taken for one that does if a few rows, read twice, are equal,
and neither a generator of random numbers nor anything that it holds has moved when they were read again; if it has no
idea of epochs, and neither it nor its code a generator; and if the run reads every row anyway and reading them takes
seconds. All rows are then read before the first step instead of along the way. A callback may still turn a page of it
(a curriculum) or change its labels in place, so what it holds is compared when an epoch begins (`content.py`), or all
of its rows where that cannot be told, and they are read anew where it has changed. Lists of rows are watched likewise.
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
from automodel.trainer.content import content_of
from automodel.trainer.reach import Reach, holds, reach
from automodel.trainer.stored_rows import NotStored

TRIED = 8
PATIENCE_S = 30.0
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
DRAWS = {"default_rng", "RandomState", "SystemRandom", "urandom", "token_bytes"}
"""What makes generators, or draws without one."""
DATA = (list, dict, set, int, float, str, bool, np.ndarray, torch.Tensor)
"""Globals that rows may be made from."""


def samples_taken(args: Any, dataset: Any) -> int:
    """How many rows a run will read, with those that it reads again."""
    if args.max_steps > 0:
        return args.max_steps * args.train_batch_size * args.gradient_accumulation_steps
    return int(args.num_train_epochs * len(dataset)) if hasattr(dataset, "__len__") else 0


class Listed:
    """A list of rows, which somebody may change in place."""

    def __init__(self, rows: list[Any]):
        self.rows, self.content = rows, content_of(rows)

    def again(self) -> bool:
        """Whether they are other rows than before, or nobody knows."""
        before, self.content = self.content, content_of(self.rows)
        return self.content is None or self.content != before


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
        if draws(dataset):
            raise NotStored(f"{name} has a generator of random numbers")
        self.dataset, self.code = dataset, [_code_of(part) for part in _parts(dataset)]
        with nothing_drawn():
            self._check_same_again(count, name)
        self.rows = self._read()

    def again(self) -> bool:
        """Whether the dataset gives other rows than before; then they are read anew."""
        with nothing_drawn():
            same = len(self.dataset) == len(self.rows) and self._state() == self.state
            told = self.state[0] is not None
            chosen = _a_few(len(self.rows)) if told else range(len(self.rows))
            same = same and all(_equal(self.rows[index], self.dataset[index]) for index in chosen)
        if not same:
            self.rows = self._read()
        return not same

    def _read(self) -> list[dict[str, Any]]:
        rows = [dict(self.dataset[index]) for index in range(len(self.dataset))]
        self.state = self._state()
        return rows

    def _state(self) -> tuple[bytes | None, list[Any]]:
        """What the dataset could be told to give other rows: a hash of what it and the globals of its code hold, where
        that can be told, its plain attributes, and which objects the others are."""
        attributes = [vars(part) for part in _parts(self.dataset) if hasattr(part, "__dict__")]
        known = [value for code in self.code for _, value in code.values() if isinstance(value, DATA)]
        plain = (int, float, str, bool, type(None))
        seen = [{k: v if isinstance(v, plain) else id(v) for k, v in part.items()} for part in attributes]
        return content_of([attributes, known]), seen

    def _check_same_again(self, count: int, name: str) -> None:
        """A few rows, twice, with all generators watched; and how long all of them would take. The first reading may
        leave something behind (a cache of rows), the second one nothing."""
        chosen = _a_few(count)
        before, start = _generators(), time.perf_counter()
        once = [self.dataset[index] for index in chosen]
        seconds = (time.perf_counter() - start) / len(chosen) * count
        state = self._state()
        again = [self.dataset[index] for index in chosen]
        if not all(isinstance(row, dict) or hasattr(row, "keys") for row in once):
            raise NotStored(f"rows of {name} are not dictionaries")
        moved = (_generators(), self._state()) != (before, state)
        if moved or not all(_equal(a, b) for a, b in zip(once, again)):
            raise NotStored(f"{name} computes its rows anew each time")
        if seconds > PATIENCE_S:
            raise NotStored(f"reading all {count:,} rows of {name} first would take {seconds:.0f} s")


def draws(dataset: Any) -> bool:
    """Whether a dataset or its code has a generator of its own, which reading a row may move."""
    parts = list(_parts(dataset))
    code = [_code_of(part) for part in parts]
    held = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    held += [value for one in code for _, value in one.values()]
    return any(one.words & DRAWS for one in code) or any(holds(value, GENERATORS) for value in held)


@contextmanager
def nothing_drawn() -> Generator[None]:
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


def _code_of(dataset: Any) -> Reach:
    kind = type(dataset)
    return reach(getattr(kind, "__getitem__", None), kind)


def _a_few(count: int) -> list[int]:
    return np.linspace(0, count - 1, min(count, TRIED)).astype(int).tolist()


def _generators() -> tuple[Any, ...]:
    own: Any = np.random.get_state()
    return random.getstate(), own[0], own[1].tobytes(), *own[2:], torch.get_rng_state().numpy().tobytes()


def _equal(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(np.array_equal(np.asarray(a[key]), np.asarray(b[key])) for key in a)
