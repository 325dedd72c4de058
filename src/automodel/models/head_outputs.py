"""What a language model hands to its loss instead of logits: hidden states, and the head they would go through.

The logits of 8,192 tokens and 128,256 words are 2 GiB in bf16, and a loss over them holds seven times that. The head is
one product, so the loss makes it itself, a few thousand rows at a time, and nobody ever holds all logits
(`kernels/linear_cross_entropy.py`). Whoever needs them after all asks `logits()`.

Shapes: R rows, N width, V words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel.models.router_balance import ExpertLoad

if TYPE_CHECKING:
    from automodel.kernels.vocabulary_parallel import VocabularyPart


@dataclass(frozen=True)
class Unprojected:
    """Logits as they would be: cap(scale · (hidden Wᵀ + bias)). Hidden states and weight have one dtype."""

    hidden_RN: Tensor
    weight_VN: Tensor
    bias_V: Tensor | None = None
    logit_scale: float = 1.0
    """What the family multiplies its logits by (Granite, Cohere)."""
    softcap: float | None = None
    """Where the family lets its logits saturate (Gemma 2)."""
    vocabulary: VocabularyPart | None = None
    """Which words weight and bias are of, where other ranks have the rest."""

    def logits(self) -> Tensor:
        """(R, V), all at once."""
        assert self.vocabulary is None, "this rank has only some of the words"
        logits_RV = F.linear(self.hidden_RN, self.weight_VN, self.bias_V) * self.logit_scale
        return logits_RV if self.softcap is None else self.softcap * torch.tanh(logits_RV / self.softcap)


@dataclass(frozen=True)
class Balanced:
    """Logits of a mixture of experts, and what its routers did (`router_balance.py`)."""

    logits: Tensor
    loads: tuple[ExpertLoad, ...]
    """One; of an encoder-decoder two."""
    weight: float
    """Of the balance loss."""
    labels: Tensor | float | None = None
    """How many labels the balance loss weighs as much as; none: as many as the batch has."""

    @property
    def balance(self) -> Tensor:
        return self.weight * torch.stack([load.balance() for load in self.loads]).sum()


Outputs = Tensor | Unprojected | Balanced
"""What a forward pass gives the loss."""
