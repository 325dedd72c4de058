"""How sure a language model is of its next tokens, and how often it is right: sums beside its loss.

    entropy   −Σ_v p_v · log p_v, in nats, of a token that is learned
    right     whether its label has the highest logit (the first of equal ones)

`TokenScores` adds the means of one micro-batch to those of the others, on the device, so that a recorded step can do it
too. `linear_cross_entropy` counts both while it has a chunk of logits at hand; `add_logits` counts where logits exist.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from automodel.kernels.linear_cross_entropy import IGNORE

ROWS_AT_ONCE = 256  # of logits, in fp32


class TokenScores:
    """Mean entropy and accuracy of micro-batches, until they are read."""

    def __init__(self, device: torch.device | str):
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        """Entropies, accuracies, micro-batches. Always at one place: recorded steps add to it."""
        self.calls = 0
        """How often Python added to it. A recorded step adds without Python."""
        self.of_all_ranks: Callable[[Tensor], Tensor] = lambda sums: sums
        """Adds up a micro-batch's sums over the ranks, where several train together."""

    def add(self, entropy_R: Tensor, right_R: Tensor, labels_R: Tensor) -> None:
        """Adds one micro-batch; both are 0 for rows without a label."""
        columns = (entropy_R, right_R, labels_R != IGNORE)
        self.add_sums(torch.stack([column_R.sum(dtype=torch.float64) for column_R in columns]))

    def add_sums(self, sums: Tensor) -> None:
        """Adds one micro-batch by its sums: entropy, right labels, labels."""
        self.calls += 1
        sums = self.of_all_ranks(sums.to(self.sums.device))
        one = torch.ones_like(sums[:1])
        self.sums += torch.cat((sums[:2] / sums[2].clamp(min=1), one))

    @torch.no_grad()
    def add_logits(self, logits_RV: Tensor, labels_R: Tensor) -> None:
        """Adds one micro-batch whose logits are there, row by row beside their labels."""
        self.add_sums(sums_of_logits(logits_RV, labels_R))

    def take(self) -> tuple[float, float] | None:
        """(mean entropy, mean accuracy) of the micro-batches since the last call; None where there were none."""
        entropy, right, batches = self.sums.tolist()
        self.sums.zero_()
        return (entropy / batches, right / batches) if batches else None


def sums_of_logits(logits_RV: Tensor, labels_R: Tensor) -> Tensor:
    """(entropy, right labels, labels), in fp64. The definition, a few rows at a time."""
    rows_R = (labels_R != IGNORE).nonzero().squeeze(1)
    sums = torch.zeros(3, dtype=torch.float64, device=logits_RV.device)
    for chosen in rows_R.split(ROWS_AT_ONCE):
        log_p_CV = logits_RV.index_select(0, chosen).float().log_softmax(1)
        own_C = labels_R.index_select(0, chosen)
        entropy = -(log_p_CV.exp() * log_p_CV).sum(dtype=torch.float64)
        right = (log_p_CV.argmax(1) == own_C).sum(dtype=torch.float64)
        sums += torch.stack((entropy, right, torch.full_like(right, len(chosen))))
    return sums
