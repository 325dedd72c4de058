"""Layers of post-norm encoders on the CPU: the families of `fused_encoder.py`, with `kernels/cpu_layer.py` inside.

The swap is made on the instances; parameters stay where they are and keep their names.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from automodel.kernels.cpu_attention import Documents
from automodel.kernels.cpu_layer import LayerShape, LayerWeights, Matrices, post_norm_layer
from automodel.kernels.cpu_products import Bf16Copies, Fp32Products, Products
from automodel.models.fused_encoder import Parts, fusable_layers


class CpuBlock:
    """Takes the place of one layer's `forward`."""

    def __init__(self, layer: nn.Module, parts: Parts, products: Products, matrices: Matrices | None):
        self.layer, self.parts = layer, parts
        self.products, self.matrices = products, matrices

    def __call__(self, hidden_states: Tensor, *args: Any, cu_seq_lens_q: Tensor, **kwargs: Any) -> Tensor:
        p, training = self.parts, self.layer.training
        lengths = [end - start for start, end in pairwise(cu_seq_lens_q.tolist()) if end > start]
        documents = Documents(lengths, lengths, p.scaling, p.attention_dropout if training else 0.0)
        dropped = (p.out_dropout, p.down_dropout) if training else (0.0, 0.0)
        shape = LayerShape(p.heads, p.attention_norm.eps, p.output_norm.eps, *dropped)
        x = hidden_states.squeeze(0)
        return post_norm_layer(x, weights_of(p), shape, documents, self.products, self.matrices).unsqueeze(0)


def weights_of(p: Parts) -> LayerWeights:
    joined = (p.query, p.key, p.value)
    rest = (p.out, p.attention_norm, p.up, p.down, p.output_norm)
    return LayerWeights(
        *(m.weight for m in joined), *(m.bias for m in joined), *(t for m in rest for t in (m.weight, m.bias))
    )


def copied_matrices(p: Parts, copies: Bf16Copies) -> Matrices:
    joined = (p.query, p.key, p.value)
    rest = (p.out, p.up, p.down)
    return Matrices(
        copies.of(*(m.weight for m in joined)),
        copies.of(*(m.bias for m in joined)),
        *(copies.of(t) for m in rest for t in (m.weight, m.bias)),
    )


def use_cpu_blocks(model: Any, products: Products | None = None, copies: Bf16Copies | None = None) -> int:
    """Swaps the layers that are still stock, where the family is in the table; returns how many. `copies`: of matrices,
    for products in bf16."""
    stock = [(layer, parts) for layer, parts in fusable_layers(model) if "forward" not in layer.__dict__]
    for layer, parts in stock:
        matrices = None if copies is None else copied_matrices(parts, copies)
        layer.forward = CpuBlock(layer, parts, products or Fp32Products(), matrices)
    return len(stock)
