"""How much the balance loss of each micro-batch weighs in a step, and what the ranks sum for it.

The definition stands in `models/router_balance.py`. The micro-batches of the ranks that have the same number in the
step are one micro-batch. For each, ranks sum E + 2 numbers (E experts, rows, tokens), before the backward pass that
sends the first gradients. A rank with fewer micro-batches than others takes part with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from automodel.distributed.world import Alone
from automodel.models.head_outputs import Balanced, Outputs


class StepBalance:
    """The balance losses of one step's micro-batches. Called once for each of this rank's, in their order."""

    def __init__(self, sizes: Sequence[int], ranks: Alone, own: int, *, labels: float, tokens: float, device: str):
        """`sizes`: experts of each load; empty where the model has no balance loss. `own`: micro-batches of this rank.
        `labels`, `tokens`: of the whole step, over all ranks."""
        self.sizes, self.ranks, self.device = sizes, ranks, device
        self.labels, self.tokens = labels, max(tokens, 1.0)
        self.together = bool(sizes) and ranks.together
        self.own, self.begun = own, 0
        self.rounds = ranks.highest(own) if self.together else own

    def weighed(self, outputs: Outputs, tokens: int, speaks: bool = True) -> Outputs:
        """The same outputs, whose balance loss weighs what it should. `tokens`: of this rank's micro-batch. `speaks`:
        whether they count; those of a blank batch, or of one that another rank has too, do not."""
        if not self.sizes:
            return outputs
        self.begun += 1
        if not self.together:
            if not isinstance(outputs, Balanced):
                return outputs
            return replace(outputs, labels=self.labels * tokens / self.tokens)
        loads = outputs.loads if isinstance(outputs, Balanced) else ()
        parts = [part for load in loads for part in (load.chosen_E, load.rows.reshape(1))]
        own = torch.cat([*parts, torch.full((1,), float(tokens), device=self.device)]) if parts else self._nothing()
        summed = self._sum(own.detach() if speaks else torch.zeros_like(own))
        if self.begun == self.own:
            self.finish()  # before the backward pass that follows, which begins to send gradients
        if not isinstance(outputs, Balanced):
            return outputs
        *of_loads, tokens_of_all = summed.split([size for experts in self.sizes for size in (experts, 1)] + [1])
        joined = [load.joined(of_loads[2 * i], of_loads[2 * i + 1][0]) for i, load in enumerate(loads)]
        return replace(outputs, loads=tuple(joined), labels=self.labels * tokens_of_all[0] / self.tokens)

    def finish(self) -> None:
        """Takes part in the sums of micro-batches that other ranks have and this one has not."""
        while self.together and self.begun < self.rounds:
            self.begun += 1
            self._sum(self._nothing())

    def _nothing(self) -> Tensor:
        return torch.zeros(sum(self.sizes) + len(self.sizes) + 1, device=self.device)

    def _sum(self, numbers: Tensor) -> Tensor:
        self.ranks.add_up([numbers])
        return numbers
