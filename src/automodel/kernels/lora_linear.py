"""Low-rank adapters inside fused blocks: one read of x for all layers of a product, and a backward pass by hand.

    y[:, oᵢ] = x Wᵢᵀ + bᵢ + sᵢ (x Aᵢᵀ) Bᵢᵀ              layers i of one joined product (query, key, value; gate, up)

    h  = x [A₁; …; Aₙ]ᵀ                                  one thin product for all layers; kept: (T, ΣR) numbers
    y  = x Wᵀ + b,   y[:, oᵢ] += sᵢ hᵢ Bᵢᵀ                in place
    u  = [s₁ dy[:, o₁] B₁  …  sₙ dy[:, oₙ] Bₙ]
    dx = dy W + u [A₁; …; Aₙ]                            in place
    dA = uᵀ x        dBᵢ = sᵢ dy[:, oᵢ]ᵀ hᵢ               beside the chain, on the side stream

W is frozen and has no gradient; x is kept once for the whole product. `lora_swiglu_linear` is the product behind a
gated MLP and keeps, like `swiglu.swiglu_linear`, what goes into the activation alone: the backward kernel writes the
activation over its gradient, just when dA needs it.

Dropout: `dropped` is what the adapters read instead of x, one mask for all layers of a product. (PEFT draws one for
each layer; the distribution of each layer's is the same.)

The functions are the same on every device: torch products, and the activation kernels of `swiglu.py` on a GPU.

Shapes: T rows, I inputs, O outputs of all layers together, R rank of all adapters together; G = 2F, N as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.dispatch import runs_triton
from automodel.kernels.fp8_linear import _through_activation
from automodel.kernels.frozen import Below, Beside, Frozen
from automodel.kernels.side_by_side import joined_view
from automodel.kernels.side_stream import SideStream, gradients_by
from automodel.kernels.swiglu import _backward_in_place, _forward, swiglu_reference


class LowRank(NamedTuple):
    """The adapter of one layer of a product."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    first: int = 0
    """The layer's first column of the product."""


def lora_joined_linear_reference(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    adapters: Sequence[LowRank],
    dropped_TI: Tensor | None = None,
) -> Tensor:
    """The definition, for autograd to differentiate."""
    y_TO = F.linear(x_TI, weight_OI, bias_O)
    read_TI = x_TI if dropped_TI is None else dropped_TI
    for a_RI, b_OR, scale, first in adapters:
        update = scale * F.linear(F.linear(read_TI, a_RI), b_OR)
        y_TO = y_TO + F.pad(update, (first, y_TO.shape[1] - first - b_OR.shape[0]))
    return y_TO


class _Layout(NamedTuple):
    """Where the adapters of a product stand."""

    scales: tuple[float, ...]
    columns: tuple[slice, ...]
    """Of y."""
    ranks: tuple[slice, ...]
    """Of h and u."""


def _layout(adapters: Sequence[LowRank]) -> _Layout:
    columns, ranks, rank = [], [], 0
    for a_RI, b_OR, _, first in adapters:
        columns.append(slice(first, first + b_OR.shape[0]))
        ranks.append(slice(rank, rank + a_RI.shape[0]))
        rank += a_RI.shape[0]
    return _Layout(tuple(a.scale for a in adapters), tuple(columns), tuple(ranks))


def _stacked(a_RIs: Sequence[Tensor]) -> Tensor:
    """All A below each other, without a copy where they lie so."""
    joined = joined_view(a_RIs)
    return torch.cat(list(a_RIs)) if joined is None else joined


def _add_adapters(y_TO: Tensor, h_TR: Tensor, bs: Sequence[Tensor], layout: _Layout) -> None:
    for b_OR, scale, columns, ranks in zip(bs, *layout):
        y_TO[:, columns].addmm_(h_TR[:, ranks], b_OR.t(), alpha=scale)


def _up(dy_TO: Tensor, bs: Sequence[Tensor], layout: _Layout) -> Tensor:
    """u: what reaches the adapters' inner side."""
    u_TR = dy_TO.new_empty((dy_TO.shape[0], layout.ranks[-1].stop))
    for b_OR, scale, columns, ranks in zip(bs, *layout):
        u_TR[:, ranks].addmm_(dy_TO[:, columns], b_OR, beta=0, alpha=scale)
    return u_TR


def _adapter_gradients(
    dy_TO: Tensor, u_TR: Tensor, read_TI: Tensor, h_TR: Tensor, bs: Sequence[Tensor], layout: _Layout
) -> list[Tensor]:
    """dA of all layers, then dB. Those of joined layers are blocks of one product, dyᵀ h, which reads dy once and as it
    lies; what else it computes costs less than reading parts of dy one after the other."""
    found = list((u_TR.t() @ read_TI).split([r.stop - r.start for r in layout.ranks]))
    if len(bs) > 1 and len(set(layout.scales)) == 1:
        joined_OR = dy_TO.new_empty((dy_TO.shape[1], h_TR.shape[1]))
        joined_OR.addmm_(dy_TO.t(), h_TR, beta=0, alpha=layout.scales[0])
        return found + [joined_OR[c, r].contiguous() for c, r in zip(layout.columns, layout.ranks)]
    for b_OR, scale, columns, ranks in zip(bs, *layout):
        db_OR = dy_TO.new_empty(b_OR.shape)
        found.append(db_OR.addmm_(dy_TO[:, columns].t(), h_TR[:, ranks], beta=0, alpha=scale))
    return found


class _LoraJoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        side: SideStream | None,
        base: Frozen,
        layout: _Layout,
        x_TI: Tensor,
        dropped_TI: Tensor | None,
        bias_O: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        count = len(layout.scales)
        a_RIs, b_ORs = parameters[:count], parameters[count:]
        read_TI = x_TI if dropped_TI is None else dropped_TI
        if isinstance(base, Beside) and dropped_TI is None and len(set(layout.scales)) == 1:
            places = list(zip(layout.columns, layout.ranks, b_ORs))
            y_TO, read_TI, h_TR = base.times_both(x_TI, _stacked(a_RIs), layout.scales[0], places, bias_O)
            ctx.scales_in_h = True
        else:
            y_TO, ctx.scales_in_h = base.times(x_TI, bias_O), False
            h_TR = read_TI @ _stacked(a_RIs).t()
            _add_adapters(y_TO, h_TR, b_ORs, layout)
        ctx.save_for_backward(read_TI, h_TR)
        ctx.side, ctx.base, ctx.layout, ctx.parameters = side, base, layout, parameters
        ctx.drops = dropped_TI is not None
        ctx.set_materialize_grads(False)
        return y_TO, x_TI.view_as(x_TI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor, around_TI: Tensor | None):
        read_TI, h_TR = ctx.saved_tensors
        count = len(ctx.layout.scales)
        a_RIs, b_ORs = ctx.parameters[:count], ctx.parameters[count:]
        u_TR = _up(dy_TO, b_ORs, ctx.layout)

        layout = ctx.layout._replace(scales=(1.0,) * count) if ctx.scales_in_h else ctx.layout

        def gradients() -> list[Tensor]:
            return _adapter_gradients(dy_TO, u_TR, read_TI, h_TR, b_ORs, layout)

        found = gradients_by(ctx.side, ctx.parameters, gradients, dy_TO, u_TR, read_TI, h_TR)
        dx_TI = ctx.base.back(dy_TO, around_TI) if ctx.needs_input_grad[3] else None
        ddropped_TI = None
        if ctx.drops and ctx.needs_input_grad[4]:
            ddropped_TI = u_TR @ _stacked(a_RIs)
        elif dx_TI is not None and not ctx.drops:
            dx_TI.addmm_(u_TR, _stacked(a_RIs))
        return None, None, None, dx_TI, ddropped_TI, None, *found


class _FrozenLinear(torch.autograd.Function):
    """Without adapters: nothing is kept."""

    @staticmethod
    def forward(ctx: Any, base: Frozen, x_TI: Tensor, bias_O: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.base = base
        ctx.set_materialize_grads(False)
        return base.times(x_TI, bias_O), x_TI.view_as(x_TI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor, around_TI: Tensor | None):
        return None, (ctx.base.back(dy_TO, around_TI) if ctx.needs_input_grad[1] else None), None


class _LoraSwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        side: SideStream | None,
        base: Frozen,
        activation: str,
        read: bool,
        scale: float,
        x_TG: Tensor,
        bias_N: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.side, ctx.base, ctx.activation, ctx.scale, ctx.parameters = side, base, activation, scale, parameters
        h_TR = y_TN = None
        if read or parameters:
            a_TF = _forward(x_TG, activation) if runs_triton(x_TG) else swiglu_reference(x_TG, activation)
            h_TR = a_TF @ parameters[0].t() if parameters else None
            y_TN = base.times(a_TF, bias_N) if read else None
        ctx.save_for_backward(x_TG, h_TR)
        if y_TN is None:
            return x_TG.new_empty((x_TG.shape[0], base.outputs))
        return y_TN if h_TR is None else y_TN.addmm_(h_TR, parameters[1].t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor):
        x_TG, h_TR = ctx.saved_tensors
        dy_TN = dy_TN.contiguous()
        if not ctx.parameters:
            dx_TG = _gate_gradient(x_TG, ctx.base.back(dy_TN), ctx.activation)
            return None, None, None, None, None, dx_TG, None
        a_RF, b_NR = ctx.parameters
        if isinstance(ctx.base, Below):
            da_TF, u_TR = ctx.base.back_both(dy_TN, b_NR, a_RF, ctx.scale)
        else:
            u_TR = dy_TN.new_empty(h_TR.shape).addmm_(dy_TN, b_NR, beta=0, alpha=ctx.scale)
            da_TF = ctx.base.back(dy_TN).addmm_(u_TR, a_RF)
        a_TF, dx_TG = _through_activation(x_TG, da_TF, ctx.activation)

        def gradients() -> list[Tensor]:
            return [u_TR.t() @ a_TF, torch.empty_like(b_NR).addmm_(dy_TN.t(), h_TR, beta=0, alpha=ctx.scale)]

        found = gradients_by(ctx.side, ctx.parameters, gradients, dy_TN, u_TR, a_TF, h_TR)
        return None, None, None, None, None, dx_TG, None, *found


def _gate_gradient(x_TG: Tensor, da_TF: Tensor, activation: str) -> Tensor:
    """The gradient of what goes into the activation, where the activation itself is not needed again."""
    if runs_triton(x_TG):
        _backward_in_place(x_TG, da_TF, activation, again=False)
        return x_TG.detach()
    return _through_activation(x_TG, da_TF, activation)[1]


def lora_joined_linear(
    x_TI: Tensor,
    base: Frozen,
    bias_O: Tensor | None,
    adapters: Sequence[LowRank],
    side: SideStream | None = None,
    dropped_TI: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(outputs of all layers side by side (T, O), x to go on with, as in `linear.joined_linear`). Adapters are leaves
    in the dtype of x, in the order of their columns; layers without one are left as they are."""
    if not adapters:
        return _FrozenLinear.apply(base, x_TI, bias_O)
    parameters = (*(a.a_RI for a in adapters), *(a.b_OR for a in adapters))
    return _LoraJoinedLinear.apply(side, base, _layout(adapters), x_TI, dropped_TI, bias_O, *parameters)


def lora_swiglu_linear(
    x_TG: Tensor,
    base: Frozen,
    bias_N: Tensor | None,
    activation: str,
    adapter: LowRank | None,
    side: SideStream | None = None,
    read: bool = True,
) -> Tensor:
    """(act(first half) · second half of x) (W + s B A)ᵀ + b, as `swiglu.swiglu_linear`: nobody else may read x, and the
    result may be anything unless it is `read`."""
    parameters = () if adapter is None else (adapter.a_RI, adapter.b_OR)
    scale = 0.0 if adapter is None else adapter.scale
    return _LoraSwiGLULinear.apply(side, base, activation, read, scale, x_TG.contiguous(), bias_N, *parameters)
