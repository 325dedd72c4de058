"""The linear layers of a model's blocks on the CPU, with products in bf16 or by oneDNN (`kernels/cpu_products.py`).

In bf16 this takes the place of autocast: products of the blocks read matrices that were rounded once, after the last
update. Everything else of the model stays in fp32: residuals, norms, softmax, the loss, and linear layers outside the
blocks, which are heads over a few rows. A language model's head is a large product and is made in bf16, too. Packed
attention reads queries, keys and values in bf16.

The swap is made on the instances (`forward`); parameters keep their places and names. A block that is one operation
(`cpu_block.py`) is swapped as a whole and its linear layers are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from automodel.kernels.cpu_products import Bf16Copies, Products, cpu_linear
from automodel.models.compiled_blocks import repeated_blocks
from automodel.models.cpu_block import CpuBlock, use_cpu_blocks
from automodel.models.packed_attention import ATTENDS_IN


class CpuLinear:
    """Takes the place of one linear layer's `forward`."""

    def __init__(self, linear: Any, products: Products, copies: Bf16Copies | None):
        self.linear, self.products = linear, products
        self.inputs_first = not isinstance(linear, nn.Linear)  # transformers' Conv1D
        self.copy = None if copies is None else copies.of(linear.weight)

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        used = weight.detach() if self.copy is None else self.copy
        if self.inputs_first:
            weight, used = weight.t(), used.t()
        return cpu_linear(x, weight, self.linear.bias, used, self.products)


def use_cpu_products(
    model: Any, products: Products, copies: Bf16Copies | None, *, whole_layers: bool, linears: bool
) -> None:
    """Swaps what makes the products of this model. `copies`: of matrices in bf16, for products in it; they want to be
    refreshed before every forward pass. `whole_layers`: layers are one operation where the family has such. `linears`:
    linear layers are swapped besides."""
    if whole_layers:
        use_cpu_blocks(model, products, copies)
    if not linears:
        return
    for parent, linear in linears_of_blocks(model):
        linear.forward = CpuLinear(linear, products, copies)
        if copies is not None:
            parent.__dict__[ATTENDS_IN] = products.dtype
    head = model.get_output_embeddings()
    if head is not None and is_swappable(head):
        head.forward = CpuLinear(head, products, copies)


def linears_of_blocks(model: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Linear layers with the modules that they belong to, of blocks that are no operation of their own."""
    for block in repeated_blocks(model):
        if isinstance(block.__dict__.get("forward"), CpuBlock):
            continue
        for parent in block.modules():
            yield from ((parent, child) for child in parent.children() if is_swappable(child))


def matrix_sizes(model: Any) -> list[tuple[int, int]]:
    """Inputs and outputs of the linear layers of a model's blocks, and of a language model's head."""
    from transformers.pytorch_utils import Conv1D

    inside = [module for block in repeated_blocks(model) for module in block.modules()]
    sizes = [(m.in_features, m.out_features) for m in inside if type(m) is nn.Linear]
    sizes += [(m.weight.shape[0], m.weight.shape[1]) for m in inside if type(m) is Conv1D]
    head = model.get_output_embeddings()
    return [*sizes, (head.in_features, head.out_features)] if type(head) is nn.Linear else sizes


def is_swappable(module: Any) -> bool:
    """A plain linear layer with weights in fp32, which no other code has changed."""
    from transformers.pytorch_utils import Conv1D

    return (
        type(module) in (nn.Linear, Conv1D)
        and "forward" not in module.__dict__
        and module.weight.dtype == torch.float32
        and not hasattr(module, "parametrizations")
    )
