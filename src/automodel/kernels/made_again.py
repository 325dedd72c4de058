"""Tensors that are cheaper to make again than to keep.

The product behind a norm keeps, for the gradient of its weight, what the norm gave; the norm keeps what it read. One
follows from the other in a single pass over the rows. Of 29,696 numbers that a layer of Llama-3.2-1B keeps of a token,
4,096 are results of norms: 1 GiB of 7.3 at 8,192 tokens, and 32 launches of 16 µs in a step of 129 ms. Few tokens take
little memory and feel every launch; the plan decides (`plan/fitting.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Recipe(NamedTuple):
    make: Callable[[], Tensor]


def _place_of(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@contextmanager
def made_again(tensor: Tensor, make: Callable[[], Tensor]) -> Generator[None]:
    """What is computed inside keeps `make` for its backward pass where it would keep the tensor. `make` has to give
    the same numbers then, and whatever it holds on to is kept."""
    recipe, its = _Recipe(make), _place_of(tensor)  # the hooks are kept, and must not keep the tensor

    def pack(kept: Tensor) -> Tensor | _Recipe:
        return recipe if _place_of(kept) == its else kept

    with saved_tensors_hooks(pack, lambda kept: kept.make() if isinstance(kept, _Recipe) else kept):
        yield
