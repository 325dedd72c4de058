"""Linear layers whose three products are made in FP8 (`fp8.py`).

    y  = x̂ Ŵᵀ + b               dx = d̂ Ŵ               dW = d̂ᵀ x̂               db = Σ dy

x̂ and Ŵ are x and W in e4m3, d̂ is dy in e5m2, each with one scale. Both halves of the backward pass read the same d̂, so
dy is quantised once, with its transposed copy; of x only the transposed copy is kept, which is half of what bf16 keeps.
The weight is quantised in the forward pass and again, transposed, in the backward pass: 8 bytes read and written for
each parameter of a micro-batch, in exchange for no 8-bit copies that live as long as the run.

`fp8_joined_linear` is `linear.joined_linear` and `fp8_swiglu_linear` is `swiglu.swiglu_linear`, with the same
contracts: outputs side by side, gradients by way of a side stream, x overwritten. In the latter, the activation is
quantised when it is made, and transposed after it was computed again, with the same scale: the numbers are the same.

Forward products use the tensor cores' own accumulators, backward ones add to fp32 every few steps: gradients are sums
over all tokens. That is what float8 training in torchao does, too.

Shapes: T rows, I inputs, O outputs; G = 2F inner width of a gated MLP, N its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.column_sum import rows_sum
from automodel.kernels.dispatch import runs_triton
from automodel.kernels.fp8 import E4M3, E5M2, MULTIPLE, Quantised, product, quantise, round_trip_reference
from automodel.kernels.side_by_side import fixed_place
from automodel.kernels.side_stream import SideStream, gradients_by
from automodel.kernels.swiglu import _backward_in_place, _forward, swiglu_reference

SMALLEST_WIDTH = 4096
"""Of inputs and of outputs. Below, quantising costs what the product saves: it grows with one of the two, the product
with both."""
GRADIENT = E5M2
FAST_FORWARD, FAST_BACKWARD = True, False
"""Whether products use the tensor cores' own accumulators all the way."""


def fp8_pays(inputs: int, outputs: int) -> bool:
    """Whether a product of this size is worth FP8, and possible."""
    return min(inputs, outputs) >= SMALLEST_WIDTH and fp8_possible(inputs, outputs)


def fp8_possible(inputs: int, outputs: int) -> bool:
    return inputs % MULTIPLE == 0 and outputs % MULTIPLE == 0


def fp8_linear_reference(
    x_TI: Tensor, weight_OI: Tensor, dy_TO: Tensor, bias_O: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, dx, dW) in fp32, by the definition: each operand rounded to 8 bits and back."""
    x, w, d = (
        round_trip_reference(x_TI, E4M3),
        round_trip_reference(weight_OI, E4M3),
        round_trip_reference(dy_TO, GRADIENT),
    )
    y = x @ w.t()
    return y if bias_O is None else y + bias_O.float(), d @ w, d.t() @ x


def _times(a: Tensor | None, b: Tensor | None, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
    assert a is not None
    assert b is not None
    return product(a, b, scale_a, scale_b, **options)


def _input_gradient(d: Quantised, weight_OI: Tensor, weight_scale: Tensor) -> Tensor:
    turned = quantise(weight_OI, E4M3, rows=False, scale=weight_scale)
    return _times(d.rows_TI, turned.columns_IP, d.scale, weight_scale, dtype=weight_OI.dtype, fast=FAST_BACKWARD)


def _weight_gradient(d: Quantised, x_columns: Tensor, x_scale: Tensor, weights: Sequence[Tensor]) -> Tensor:
    place = fixed_place(weights)
    return _times(d.columns_IP, x_columns, d.scale, x_scale, dtype=weights[0].dtype, out=place, fast=FAST_BACKWARD)


class _Fp8JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        side: SideStream | None,
        learns: bool,
        x_TI: Tensor,
        weight_OI: Tensor,
        n_layers: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        weights, biases = parameters[:n_layers], parameters[n_layers:]
        x = quantise(x_TI, E4M3, columns=learns)
        w = quantise(weight_OI, E4M3, columns=False)
        bias_O = None if not biases else (biases[0] if n_layers == 1 else torch.cat(biases))
        y_TO = _times(x.rows_TI, w.rows_TI, x.scale, w.scale, dtype=x_TI.dtype, bias=bias_O, fast=FAST_FORWARD)
        if learns:
            ctx.save_for_backward(x.columns_IP, x.scale, w.scale, weight_OI)
        ctx.weights, ctx.biases, ctx.side = weights, biases, side
        ctx.set_materialize_grads(False)
        return y_TO, x_TI.view_as(x_TI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor, around_TI: Tensor | None):
        x_columns, x_scale, weight_scale, weight_OI = ctx.saved_tensors
        sizes, biases = [w.shape[0] for w in ctx.weights], ctx.biases
        d = quantise(dy_TO, GRADIENT)

        def gradients() -> list[Tensor]:
            found = list(_weight_gradient(d, x_columns, x_scale, ctx.weights).split(sizes))
            return [*found, *rows_sum(dy_TO).split(sizes)] if biases else found

        reads = (d.columns_IP, d.scale, x_columns, x_scale, *([dy_TO] if biases else []))
        found = gradients_by(ctx.side, (*ctx.weights, *biases), gradients, *reads)
        dx_TI = None
        if ctx.needs_input_grad[2]:
            dx_TI = _input_gradient(d, weight_OI, weight_scale)
            dx_TI = dx_TI if around_TI is None else around_TI.add_(dx_TI)
        return None, None, dx_TI, None, None, *found


class _Fp8SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TG: Tensor,
        weight_NF: Tensor,
        bias_N: Tensor | None,
        activation: str,
        side: SideStream | None,
        read: bool,
    ) -> Tensor:
        a_TF = _forward(x_TG, activation) if runs_triton(x_TG) else swiglu_reference(x_TG, activation)
        a = quantise(a_TF, E4M3, columns=False)
        w = quantise(weight_NF, E4M3, columns=False)
        ctx.save_for_backward(x_TG, weight_NF, a.scale, w.scale)
        ctx.activation, ctx.side = activation, side
        ctx.parameters = [p for p in (weight_NF, bias_N) if p is not None]
        if not read:
            return x_TG.new_empty((x_TG.shape[0], weight_NF.shape[0]))
        return _times(a.rows_TI, w.rows_TI, a.scale, w.scale, dtype=x_TG.dtype, bias=bias_N, fast=FAST_FORWARD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor):
        x_TG, weight_NF, a_scale, weight_scale = ctx.saved_tensors
        d = quantise(dy_TN, GRADIENT)
        da_TF = _input_gradient(d, weight_NF, weight_scale)
        a_TF, dx_TG = _through_activation(x_TG, da_TF, ctx.activation)
        # On this stream: a is the largest tensor of the block, and the side stream keeps what it reads.
        a = quantise(a_TF, E4M3, rows=False, scale=a_scale)
        del a_TF, da_TF
        biases = ctx.parameters[1:]

        def gradients() -> list[Tensor]:
            assert a.columns_IP is not None
            found = [_weight_gradient(d, a.columns_IP, a_scale, ctx.parameters[:1])]
            return [*found, rows_sum(dy_TN)] if biases else found

        reads = (d.columns_IP, d.scale, a.columns_IP, a_scale, *([dy_TN] if biases else []))
        found = gradients_by(ctx.side, ctx.parameters, gradients, *reads)
        return dx_TG, found[0], (found[1] if biases else None), None, None, None


def _through_activation(x_TG: Tensor, da_TF: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """(the activation computed again, the gradient of x); on a GPU, one written over da, the other over x."""
    if runs_triton(x_TG):
        _backward_in_place(x_TG, da_TF, activation, again=True)
        return da_TF, x_TG.detach()
    with torch.enable_grad():
        x = x_TG.detach().requires_grad_()
        a_TF = swiglu_reference(x, activation)
        (dx_TG,) = torch.autograd.grad(a_TF, x, da_TF)
    return a_TF.detach(), dx_TG


def fp8_joined_linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] = (),
    side: SideStream | None = None,
) -> tuple[Tensor, Tensor]:
    """As `linear.joined_linear`, in FP8: (outputs of all layers side by side (T, O), x to go on with)."""
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (x_TI, *weights))
    return _Fp8JoinedLinear.apply(side, learns, x_TI, weight_OI, len(weights), *weights, *biases)


def fp8_swiglu_linear(
    x_TG: Tensor,
    weight_NF: Tensor,
    bias_N: Tensor | None = None,
    activation: str = "silu",
    side: SideStream | None = None,
    read: bool = True,
) -> Tensor:
    """As `swiglu.swiglu_linear`, the product in FP8. Nobody else may read x."""
    return _Fp8SwiGLULinear.apply(x_TG.contiguous(), weight_NF, bias_N, activation, side, read)
