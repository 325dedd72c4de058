"""A vocabulary of which every rank has a part: what `linear_cross_entropy` asks of the words that other ranks have.

    lse  = log Σ_ranks Σ_v exp z_v          one maximum and one sum of each row, over the ranks

A rank has the columns `start … start + V` of the logits. Of the other ranks' columns it needs a few numbers of each
row: the highest logit, the sum of exponentials, the label's own logit, and with smoothing the mean. The gradient of a
hidden state is a sum over all words, so it is summed over the ranks too; that of the head's weight stays where the
words are.

Shapes: N width, V words of this rank, C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HIGH = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class VocabularyPart:
    """Which words this rank has."""

    group: Any
    """The process group whose parts make up the vocabulary."""
    start: int
    words: int
    """Of all ranks."""

    @property
    def most(self) -> int:
        """Words of the rank that has the most: every rank cuts its rows into as many chunks."""
        return -(-self.words // dist.get_world_size(self.group))

    def own(self, labels_C: Tensor, words: int) -> tuple[Tensor, Tensor]:
        """Where each label stands among this rank's words (0 where it does not), and whether it does."""
        own_C = labels_C - self.start
        here_C = (own_C >= 0) & (own_C < words)
        return torch.where(here_C, own_C, 0), here_C

    def highest(self, highest_C: Tensor) -> Tensor:
        """Of all ranks' words."""
        dist.all_reduce(highest_C, op=dist.ReduceOp.MAX, group=self.group)
        return highest_C

    def sums(self, *own_C: Tensor) -> tuple[Tensor, ...]:
        """Sums over words, each over those of all ranks, in one exchange."""
        stacked = torch.stack(own_C)
        dist.all_reduce(stacked, group=self.group)
        return tuple(stacked)

    def count(self, own: int) -> int:
        """Words of all ranks."""
        return self.words

    def mean(self, z_CV: Tensor) -> Tensor:
        """Mean logit of each row, over the words of all ranks."""
        return self.sums(z_CV.sum(1))[0] / self.words

    def best(self, logits_CV: Tensor) -> Tensor:
        """The word with the highest logit of each row, by its number among all words; the first of equal ones."""
        best_C, at_C = logits_CV.max(1)
        highest_C = self.highest(best_C.clone())
        at_C = torch.where(best_C == highest_C, at_C + self.start, HIGH)
        dist.all_reduce(at_C, op=dist.ReduceOp.MIN, group=self.group)
        return at_C

    def join(self, dhidden_RN: Tensor) -> None:
        """Adds the other ranks' gradients of the hidden states, in place."""
        dist.all_reduce(dhidden_RN, group=self.group)
