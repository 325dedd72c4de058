"""One product for several linear layers that read the same input.

    [y₁ … yₙ] = x [W₁; …; Wₙ]ᵀ + [b₁ … bₙ]

Query, key and value are three layers of a Hugging Face model and stay three parameters, but their weights lie next to
each other in the flat buffer, so `weight` here is one view over all of them. Forward is one GEMM instead of three;
backward two instead of six, with no addition of three gradients of x. The parameters' gradients are slices of one
tensor, which autograd hands on without a copy.

A residual stream forks at such a layer: x goes through it and around it. `joined_linear` hands x back as a second
output, so that its backward receives both gradients at once and adds them inside the GEMM (dx = dx_around + dy W, in
place: `around` comes from `add_norm`, which hands it to nobody else). No separate addition over the stream.

Weight gradients may go to a `SideStream`: on small batches their GEMMs fill a third of the GPU.

Weights that do not lie next to each other (those of a sharded model, gathered one by one) make the same outputs side by
side in as many products as there are layers: `apart_linear`.

Shapes: T rows, I inputs, O outputs of all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.column_sum import rows_sum
from automodel.kernels.side_stream import SideStream, gradients_by
from automodel.kernels.weight_gradient import weight_gradient


def joined_linear_reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """The definition: each layer alone, outputs side by side."""
    pairs = zip(weights, biases or [None] * len(weights))
    return torch.cat([F.linear(x, w, b) for w, b in pairs], dim=-1)


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        side: SideStream | None,
        x_TI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        n_layers: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        weights, biases = parameters[:n_layers], parameters[n_layers:]
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.weights, ctx.biases, ctx.side = weights, biases, side
        if bias_O is None and biases:
            bias_O = biases[0] if n_layers == 1 else torch.cat(biases)
        ctx.set_materialize_grads(False)
        return F.linear(x_TI, weight_OI, bias_O), x_TI.view_as(x_TI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor, around_TI: Tensor | None):
        x_TI, weight_OI = ctx.saved_tensors
        parameters = (*ctx.weights, *ctx.biases)
        gradients = gradients_by(
            ctx.side, parameters, lambda: _parameter_gradients(dy_TO, x_TI, ctx.weights, ctx.biases), dy_TO, x_TI
        )
        if not ctx.needs_input_grad[1]:
            dx_TI = None
        elif around_TI is None:
            dx_TI = dy_TO @ weight_OI
        else:
            dx_TI = around_TI.addmm_(dy_TO, weight_OI)
        return None, dx_TI, None, None, None, *gradients


def _parameter_gradients(dy_TO: Tensor, x_TI: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]):
    sizes = [w.shape[0] for w in weights]
    gradients = list(weight_gradient(dy_TO, x_TI, weights).split(sizes))
    if biases:
        gradients += rows_sum(dy_TO).split(sizes)
    return gradients


def joined_linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] = (),
    side: SideStream | None = None,
    bias_O: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(outputs of all layers side by side (T, O), x to go on with). `weight_OI` is a view over `weights`, which are
    neighbours in memory; gradients go to `weights` and `biases`, by way of `side` where there is one. `bias_O`: the
    biases side by side, where somebody has them so (`JoinedBiases`)."""
    return _JoinedLinear.apply(side, x_TI, weight_OI, bias_O, len(weights), *weights, *biases)


class _ApartLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, n_layers: int, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        weights, biases = parameters[:n_layers], parameters[n_layers:]
        ctx.save_for_backward(x_TI, *weights)
        ctx.has_biases = bool(biases)
        ctx.set_materialize_grads(False)
        y_TO = x_TI.new_empty((x_TI.shape[0], sum(w.shape[0] for w in weights)))
        for out, weight, bias in zip(_outputs(y_TO, weights), weights, biases or [None] * n_layers):
            if bias is None:
                torch.mm(x_TI, weight.t(), out=out)
            else:
                torch.addmm(bias, x_TI, weight.t(), out=out)
        return y_TO, x_TI.view_as(x_TI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor, around_TI: Tensor | None):
        x_TI, *weights = ctx.saved_tensors
        parts = _outputs(dy_TO, weights)
        gradients = [dy.t() @ x_TI for dy in parts]
        if ctx.has_biases:
            gradients += rows_sum(dy_TO).split([w.shape[0] for w in weights])
        dx_TI = around_TI if ctx.needs_input_grad[0] else None
        for dy, weight in zip(parts, weights):
            if ctx.needs_input_grad[0]:
                dx_TI = dy @ weight if dx_TI is None else dx_TI.addmm_(dy, weight)
        return dx_TI, None, *gradients


def _outputs(joined_TO: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each layer's columns."""
    return joined_TO.split([w.shape[0] for w in weights], dim=1)


def apart_linear(x_TI: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """`joined_linear` for weights that lie anywhere."""
    return _ApartLinear.apply(x_TI, len(weights), *weights, *biases)


class JoinedBiases:
    """Biases of products that several layers share, gathered for all blocks of a model in one launch.

    Each bias starts on a block boundary of the flat buffer, so those of query, key and value are no neighbours, and
    joining them block by block is a launch before every product. They are values of one buffer, though: `gather` copies
    all of them, `of(block)` is the block's part."""

    def __init__(self, blocks: Sequence[Sequence[Tensor]]):
        first = blocks[0][0].detach()
        self.buffer = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage())
        places = [int(b.storage_offset()) + torch.arange(b.numel()) for block in blocks for b in block]
        self.places = torch.cat(places).to(first.device)
        self.joined = torch.empty(len(self.places), dtype=first.dtype, device=first.device)
        self.sizes = [sum(b.numel() for b in block) for block in blocks]

    @staticmethod
    def can_take(blocks: Sequence[Sequence[Tensor]]) -> bool:
        """Whether all of them are part of one buffer."""
        biases = [b for block in blocks for b in block]
        if not biases or any(b is None or not b.is_contiguous() for b in biases):
            return False
        return len({(b.untyped_storage().data_ptr(), b.dtype) for b in biases}) == 1

    @torch.no_grad()
    def gather(self) -> None:
        """After every update, before anything reads them."""
        torch.index_select(self.buffer, 0, self.places, out=self.joined)

    def of(self, block: int) -> Tensor:
        return self.joined.split(self.sizes)[block]
