"""The state of every random generator a step may draw from, as tensors and JSON."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automodel.distributed.world import Alone

RANK_STRIDE = 0x9E3779B97F4A7C15  # far apart: seeds that people choose are small numbers
BESIDES = "host"  # the rest of a rank's state: Python's generator, and NumPy's position


def capture() -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["cuda"] = torch.cuda.get_rng_state()
    version, words, position = random.getstate()
    # The legacy global generator is what third-party code draws from, so it is what has to be restored.
    kind, keys, at, has_gauss, gauss = np.random.get_state()
    tensors["numpy"] = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    values = {
        "python": [version, list(words), position],
        "numpy": [kind, int(at), int(has_gauss), float(gauss)],
    }
    return tensors, values


def capture_of_all(ranks: Alone) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`capture`, and besides what the other ranks draw from. Called by all of them."""
    tensors, values = capture()
    if ranks.size == 1:
        return tensors, values
    of_this_rank = {name: tensors[name] for name in ("torch", "cuda", "numpy") if name in tensors}
    of_this_rank[BESIDES] = _as_numbers(values)
    for name, state in of_this_rank.items():
        tensors |= {f"{name}.{rank}": each for rank, each in enumerate(ranks.gathered(state)) if rank}
    return tensors, values


def restore_own(tensors: dict[str, Tensor], values: dict[str, Any], seed: int, ranks: Alone, group: int = 1) -> None:
    """`restore` for the first rank; the others take up their own generators, or begin new ones where there were fewer
    ranks. `group`: neighbours that must draw alike, as the first of them does."""
    leader = ranks.rank // group * group
    own = {name: tensors.get(f"{name}.{leader}") for name in ("torch", "cuda", "numpy")}
    restore(tensors, values)
    if leader == 0:
        return
    if own["torch"] is None:
        seed_rank(seed, ranks, group)
        return
    besides = tensors.get(f"{BESIDES}.{leader}")  # checkpoints of before have it of the first rank alone
    values = values if besides is None else _from_numbers(besides)
    restore({**tensors, **{name: state for name, state in own.items() if state is not None}}, values)


def _as_numbers(values: dict[str, Any]) -> Tensor:
    """What `capture` keeps as JSON, in one tensor that ranks can send; fp64 holds 32-bit words exactly."""
    version, words, gauss = values["python"]
    _, at, has_gauss, numpy_gauss = values["numpy"]
    drawn = float("nan") if gauss is None else gauss
    return torch.tensor([version, drawn, at, has_gauss, numpy_gauss, *words], dtype=torch.float64)


def _from_numbers(numbers: Tensor) -> dict[str, Any]:
    version, drawn, at, has_gauss, numpy_gauss, *words = numbers.tolist()
    return {
        "python": [int(version), [int(word) for word in words], None if drawn != drawn else drawn],
        "numpy": ["MT19937", int(at), int(has_gauss), numpy_gauss],
    }


def seed_rank(seed: int, ranks: Alone, group: int = 1) -> None:
    """Another dropout on every rank, or for every `group` of neighbours; the first keeps the run's own."""
    if ranks.rank // group:
        seed_everything((seed + ranks.rank // group * RANK_STRIDE) % 2**63)


def restore(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    version, words, position = values["python"]
    random.setstate((version, tuple(words), position))
    kind, at, has_gauss, gauss = values["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), at, has_gauss, gauss))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
