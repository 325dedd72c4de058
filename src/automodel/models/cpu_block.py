"""Layers of post-norm encoders on the CPU: the families of `fused_encoder.py`, with `kernels/cpu_layer.py` inside.

The swap is made on the instances; parameters stay where they are and keep their names.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from automodel.kernels.cpu_attention import Documents
from automodel.kernels.cpu_layer import LayerShape, LayerWeights, post_norm_layer
from automodel.models.fused_encoder import Parts, fusable_layers


class CpuBlock:
    """Takes the place of one layer's `forward`."""

    def __init__(self, layer: nn.Module, parts: Parts):
        self.layer, self.parts = layer, parts

    def __call__(self, hidden_states: Tensor, *args: Any, cu_seq_lens_q: Tensor, **kwargs: Any) -> Tensor:
        p, training = self.parts, self.layer.training
        lengths = [end - start for start, end in pairwise(cu_seq_lens_q.tolist()) if end > start]
        documents = Documents(lengths, lengths, p.scaling, p.attention_dropout if training else 0.0)
        dropped = (p.out_dropout, p.down_dropout) if training else (0.0, 0.0)
        shape = LayerShape(p.heads, p.attention_norm.eps, p.output_norm.eps, *dropped)
        return post_norm_layer(hidden_states.squeeze(0), weights_of(p), shape, documents).unsqueeze(0)


def weights_of(p: Parts) -> LayerWeights:
    joined = (p.query, p.key, p.value)
    rest = (p.out, p.attention_norm, p.up, p.down, p.output_norm)
    return LayerWeights(
        *(m.weight for m in joined), *(m.bias for m in joined), *(t for m in rest for t in (m.weight, m.bias))
    )


def use_cpu_blocks(model: Any) -> int:
    """Swaps the layers that are still stock, where the family is in the table; returns how many."""
    stock = [(layer, parts) for layer, parts in fusable_layers(model) if "forward" not in layer.__dict__]
    for layer, parts in stock:
        layer.forward = CpuBlock(layer, parts)
    return len(stock)
