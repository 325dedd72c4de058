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

from automodel.kernels.linear_cross_entropy import IGNORE, LOWEST_BELOW

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
    """(entropy, right labels, labels), in fp64. The definition, a few rows at a time. Rows without a label are computed
    and left out: to choose rows, the host would have to wait for the device, which a recorded step cannot do."""
    sums = torch.zeros(3, dtype=torch.float64, device=logits_RV.device)
    for logits_CV, labels_C in zip(logits_RV.split(ROWS_AT_ONCE), labels_R.split(ROWS_AT_ONCE)):
        learned_C = labels_C != IGNORE
        log_p_CV = logits_CV.float().log_softmax(1)
        right_C = learned_C & (log_p_CV.argmax(1) == labels_C)
        # A logit of -inf has probability 0, and 0 · -inf is no number.
        entropy_C = -(log_p_CV.exp() * log_p_CV.clamp(min=LOWEST_BELOW)).sum(1, dtype=torch.float64)
        columns = (torch.where(learned_C, entropy_C, 0.0), right_C, learned_C)
        sums += torch.stack([column_C.sum(dtype=torch.float64) for column_C in columns])
    return sums
