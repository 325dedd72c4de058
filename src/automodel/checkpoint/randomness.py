"""The state of every random generator a step may draw from, as tensors and JSON."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automodel.distributed.world import Alone

RANK_STRIDE = 0x9E3779B97F4A7C15  # far apart: seeds that people choose are small numbers


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
    """`capture`, and besides what the other ranks draw dropout from. Called by all of them."""
    tensors, values = capture()
    for name in ("torch", "cuda"):
        if name in tensors and ranks.size > 1:
            states = ranks.gathered(tensors[name])
            tensors |= {f"{name}.{rank}": state for rank, state in enumerate(states) if rank}
    return tensors, values


def restore_own(tensors: dict[str, Tensor], values: dict[str, Any], seed: int, ranks: Alone, group: int = 1) -> None:
    """`restore` for the first rank; the others take up their own generators, or begin new ones where there were fewer
    ranks. `group`: neighbours that must draw alike, as the first of them does."""
    leader = ranks.rank // group * group
    own = {name: tensors.get(f"{name}.{leader}") for name in ("torch", "cuda")}
    restore(tensors, values)
    if leader == 0:
        return
    if own["torch"] is None:
        seed_rank(seed, ranks, group)
    else:
        restore({**tensors, **{name: state for name, state in own.items() if state is not None}}, values)


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
