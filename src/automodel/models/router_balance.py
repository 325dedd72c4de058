"""The balance loss of a mixture of experts: how unevenly its routers spread the tokens of a micro-batch.

    balance = E · Σ_e f_e · P_e      f_e = chosen_e / rows, P_e = probability_e / rows

A row is a token in a layer; sums go over all layers together and leave padding out. `chosen_e` counts the rows that
went to expert e and carries no gradient; `probability_e` is the sum of its probabilities. Transformers computes the
same from the same router logits.

The balance loss is a product of two means, and not a sum over tokens: no division makes that of two halves of a batch
equal to that of the whole. So it is defined by micro-batch:

- A step adds  weight · Σ_m (tokens_m / tokens) · balance_m  over its micro-batches m, in which several ranks together
  have one micro-batch. With one micro-batch in a step this is what transformers adds.
- Ranks sum `chosen_e` and `rows` before the product (`joined`). Each keeps its own `probability_e`: the sum of the
  ranks' balances is then that of all their tokens, and no gradient has to cross from one rank to another.

Legend: E experts, R rows of one layer, k experts a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertLoad:
    """What the routers of one batch did, summed over rows and layers, in fp32."""

    chosen_E: Tensor
    """Rows that went to each expert; without a gradient."""
    probability_E: Tensor
    """Sums of the experts' probabilities."""
    rows: Tensor
    """0-dim."""

    def balance(self) -> Tensor:
        """The balance loss, before its weight; of a `joined` load, this rank's part of it."""
        chosen_E, probability_E = self.chosen_E / self.rows, self.probability_E / self.rows
        return len(chosen_E) * (chosen_E * probability_E).sum()

    def joined(self, chosen_E: Tensor, rows: Tensor) -> ExpertLoad:
        """This rank's probabilities beside what all ranks chose."""
        return replace(self, chosen_E=chosen_E, rows=rows)


def expert_load(layers: Sequence[Tensor], top_k: int, mask: Tensor | None) -> ExpertLoad:
    """`layers`: router logits (R, E) of each layer. `mask`: 1 on the rows that count, in any shape of R elements; none:
    all rows count."""
    first = layers[0]
    chosen_E = torch.zeros(first.shape[-1], device=first.device)
    probability_E, rows = torch.zeros_like(chosen_E), torch.zeros((), device=first.device)
    for logits_RE in layers:
        # In the dtype of the logits, as transformers does: rounded otherwise, ties would fall to other experts.
        probability_RE = logits_RE.to(first.device).softmax(-1)
        chosen_Rk = probability_RE.topk(top_k, dim=-1).indices
        counts_R = probability_RE.new_ones(len(probability_RE)) if mask is None else mask.reshape(-1)
        counts_R = counts_R.to(first.device, torch.float32)
        chosen_E = chosen_E.index_add(0, chosen_Rk.reshape(-1), counts_R.repeat_interleave(top_k))
        probability_E = probability_E + (probability_RE.float() * counts_R.unsqueeze(-1)).sum(0)
        rows = rows + counts_R.sum()
    return ExpertLoad(chosen_E, probability_E, rows)
