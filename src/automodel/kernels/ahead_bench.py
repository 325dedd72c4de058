"""What recipes are made of (`ahead_recipes.py`): tensors of a few rows, and the names of the kernels they launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from automodel.kernels.ahead_facts import Facts

TOKENS, DOCUMENTS = 64, 4
DTYPES = {"bf16": torch.bfloat16, "bf16-pure": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Bench:
    """What a recipe works with."""

    facts: Facts

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return DTYPES.get(self.facts.precision, torch.float32)

    @property
    def seed(self) -> Tensor:
        """What dropout reads."""
        return torch.zeros(1, dtype=torch.int64)

    def rows(self, count: int, width: int) -> Tensor:
        """Activations with a gradient. An intermediate result, as they are in a model."""
        return torch.zeros((count, width), dtype=self.dtype, requires_grad=True) * 1.0

    def vector(self, width: int) -> Tensor:
        """A weight or bias."""
        return torch.zeros(width, dtype=self.dtype, requires_grad=True)

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether to learn: yes, and no where the run evaluates."""
        return (True, False) if self.facts.evaluation_batch else (True,)

    def row_counts(self) -> Iterator[tuple[int, bool]]:
        """Rows that a block may have to normalise, and whether it learns from them: all tokens, or one a document."""
        for learns in self.modes:
            yield TOKENS, learns
            if self.facts.shape.pools:
                yield self.facts.batch if learns else self.facts.evaluation_batch, learns


class Recipe(NamedTuple):
    """A function that launches what a run launches."""

    name: str
    run: Callable[[Bench], None]
    kernels: tuple[str, ...]
    """All it may launch."""
    blocks: tuple[str, ...]
    """The kinds of blocks that need it."""


def recipe(*kernels: str, blocks: tuple[str, ...]) -> Callable[[Any], Recipe]:
    return lambda run: Recipe(run.__name__, run, kernels, blocks)


def documents() -> Tensor:
    """Boundaries of a few documents."""
    return torch.arange(DOCUMENTS + 1, dtype=torch.int32) * (TOKENS // DOCUMENTS)


def learn(*results: Tensor) -> None:
    """A backward pass from all of them. (Gradients handed to it would make torch import sympy, half a second.)"""
    torch.stack([r.sum() for r in results]).sum().backward()
