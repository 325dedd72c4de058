"""The last block of a classifier, computed only for the token it pools.

After the last block nobody reads anything but one token of each document. Its keys and values need every token, but its
queries, attention output, MLP and norms are needed for the pooled rows alone: of the 12 N² multiplications a token that
a block costs, two remain. For six layers that is a seventh of all arithmetic, and it is exact.

This is the form for plain modules (the CPU, and eager steps on a GPU); `fused_encoder.py` has its own. The swap is made
on the instance, and parameters keep their names.

Legend: T tokens, R pooled rows, N width, H heads, D head dimension.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from automodel.kernels.cpu_attention import Documents, document_attention
from automodel.models.fused_encoder import ENCODERS, Parts


class PooledBlock:
    """Takes the place of the last layer's `forward`; returns the pooled rows, (1, R, N)."""

    pools = True

    def __init__(self, layer: nn.Module, parts: Parts):
        from transformers.activations import ACT2FN

        self.layer, self.parts = layer, parts
        self.activation = ACT2FN[parts.activation]

    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        cu_seq_lens_q: Tensor,
        pooled_positions: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        p, x_TN = self.parts, hidden_states.squeeze(0)  # the backward of an index would write a zeroed copy
        rows_RN = x_TN.index_select(0, pooled_positions)
        attended_RN = self._attend(p.query(rows_RN), p.key(x_TN), p.value(x_TN), cu_seq_lens_q.tolist())
        h_RN = p.attention_norm(rows_RN + self._dropout(p.out(attended_RN), p.out_dropout))
        inner = p.down(self.activation(p.up(h_RN)))
        return p.output_norm(h_RN + self._dropout(inner, p.down_dropout)).unsqueeze(0)

    def _dropout(self, x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p, self.layer.training)

    def _attend(self, q_RN: Tensor, k_TN: Tensor, v_TN: Tensor, boundaries: list[int]) -> Tensor:
        """One query a document: row r attends to document r. Documents past the last row have none."""
        p, lengths = self.parts, [end - start for start, end in pairwise(boundaries)]
        rows = [1] * len(q_RN) + [0] * (len(lengths) - len(q_RN))
        documents = Documents(rows, lengths, p.scaling, p.attention_dropout if self.layer.training else 0.0)
        q, k, v = (x.unflatten(1, (p.heads, -1)) for x in (q_RN, k_TN, v_TN))
        return document_attention(q, k, v, documents).flatten(1)


def pool_last_block(model: Any) -> bool:
    """Swaps the last layer, where the family is in the table; says whether it did."""
    encoder = ENCODERS.get(model.config.model_type)
    if encoder is None:
        return False
    layer = encoder.layers(model)[-1]
    layer.forward = PooledBlock(layer, encoder.parts(layer, model.config))
    return True
