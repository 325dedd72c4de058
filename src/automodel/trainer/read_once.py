"""Datasets that are classes of the script's own, read once where that is safe.

    class Reviews(torch.utils.data.Dataset):
        def __getitem__(self, i): return {k: torch.tensor(v[i]) for k, v in self.encodings.items()}

Such a class may do anything, but most look rows up. It is taken for one that does if a few rows, read twice, are equal,
and no generator of random numbers has moved meanwhile; if it has no idea of epochs; and if the run reads every row
anyway and reading them takes seconds. All rows are then read before the first step instead of along the way.
"""

from __future__ import annotations

import random
import time
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


def read_once(dataset: Any, samples: int) -> list[dict[str, Any]]:
    """Every row of a map-style dataset. `samples`: how many the run will take. Raises `NotStored`."""
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
    tensors, values = randomness.capture()
    try:
        _check_same_again(dataset, count, name)
    finally:
        randomness.restore(tensors, values)  # whoever draws will draw what he would have drawn
    return [dict(dataset[index]) for index in range(count)]


def _check_same_again(dataset: Any, count: int, name: str) -> None:
    """A few rows, twice, with all generators watched; and how long all of them would take."""
    chosen = np.linspace(0, count - 1, min(count, TRIED)).astype(int).tolist()
    before, start = _generators(), time.perf_counter()
    once = [dataset[index] for index in chosen]
    seconds = (time.perf_counter() - start) / len(chosen) * count
    again = [dataset[index] for index in chosen]
    if not all(isinstance(row, dict) or hasattr(row, "keys") for row in once):
        raise NotStored(f"rows of {name} are not dictionaries")
    if _generators() != before or not all(_equal(a, b) for a, b in zip(once, again)):
        raise NotStored(f"{name} computes its rows anew each time")
    if seconds > PATIENCE_S:
        raise NotStored(f"reading all {count:,} rows of {name} first would take {seconds:.0f} s")


def _generators() -> tuple[Any, ...]:
    own: Any = np.random.get_state()
    return random.getstate(), own[0], own[1].tobytes(), *own[2:], torch.get_rng_state().numpy().tobytes()


def _equal(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(np.array_equal(np.asarray(a[key]), np.asarray(b[key])) for key in a)
