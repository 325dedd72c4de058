"""One product for several linear layers that read the same input.

    [y₁ … yₙ] = x [W₁; …; Wₙ]ᵀ + [b₁ … bₙ]

Query, key and value are three layers of a Hugging Face model and stay three parameters, but their weights lie next to
each other in the flat buffer, so `weight` here is one view over all of them. Forward is one GEMM instead of three;
backward two instead of six, with no addition of three gradients of x. The parameters' gradients are slices of one
tensor, which autograd hands on without a copy.

A residual stream forks at such a layer: x goes through it and around it. `joined_linear` hands x back as a second
output, so that its backward receives both gradients at once and adds them inside the GEMM (dx = dx_around + dy W): no
separate addition over the stream.

Shapes: T rows, I inputs, O outputs of all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def joined_linear_reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """The definition: each layer alone, outputs side by side."""
    pairs = zip(weights, biases or [None] * len(weights))
    return torch.cat([F.linear(x, w, b) for w, b in pairs], dim=-1)


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, n_layers: int, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        weights, biases = parameters[:n_layers], parameters[n_layers:]
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.sizes = [w.shape[0] for w in weights]
        ctx.has_bias = bool(biases)
        bias_O = None if not biases else (biases[0] if n_layers == 1 else torch.cat(biases))
        ctx.set_materialize_grads(False)
        return F.linear(x_TI, weight_OI, bias_O), x_TI.view_as(x_TI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor, around_TI: Tensor | None):
        x_TI, weight_OI = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            dx_TI = None
        elif around_TI is None:
            dx_TI = dy_TO @ weight_OI
        else:
            dx_TI = torch.addmm(around_TI, dy_TO, weight_OI)
        dweights = (dy_TO.t() @ x_TI).split(ctx.sizes)
        dbiases = dy_TO.sum(0, dtype=torch.float32).to(dy_TO.dtype).split(ctx.sizes) if ctx.has_bias else ()
        return dx_TI, None, None, *dweights, *dbiases


def joined_linear(
    x_TI: Tensor, weight_OI: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """(outputs of all layers side by side (T, O), x to go on with). `weight_OI` is a view over `weights`, which are
    neighbours in memory; gradients go to `weights` and `biases`."""
    return _JoinedLinear.apply(x_TI, weight_OI, len(weights), *weights, *biases)
