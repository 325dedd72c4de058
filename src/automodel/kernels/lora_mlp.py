"""A gated MLP over frozen weights with adapters on all its layers, as one function.

    g = x Wgᵀ + sg (x Agᵀ) Bgᵀ      u = x Wuᵀ + su (x Auᵀ) Buᵀ      a = act(g) · u      y = a Wdᵀ + sd (a Adᵀ) Bdᵀ

Product by product (`lora_linear.py`), what the adapters add to g and u is written into a tensor of twice the inner
width, which is read and written for it: on an H200 that takes more than twice as long as the activation itself. The
same again for the gradient of a. Here both are part of the two passes that go over these tensors anyway
(`lora_mlp_triton.py`): g and u come out of the frozen product without their adapters, which the activation kernel adds
on the way, forward and once more backward, where it also adds the adapter's part to the gradient of a before that goes
through the activation.

Kept for the backward pass: x, the frozen product [g u], two thin tensors. a is made again.

Without a GPU it is `lora_linear.py`'s two functions, which also compute whatever this one does not: dropout, layers
without adapters, gate and up of unlike ranks.

Shapes: T rows, I outer width, F inner width, G = 2F, R rank of gate's and up's adapters together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from automodel.kernels.dispatch import power_of_two_above, runs_triton
from automodel.kernels.frozen import Frozen
from automodel.kernels.lora_linear import LowRank, _adapter_gradients, _Layout, _layout, _stacked, _up
from automodel.kernels.side_stream import SideStream, gradients_by

SMALLEST_RANK, LARGEST_RANK = 16, 64
"""What tensor cores multiply, and what registers hold."""


class Launch(NamedTuple):
    rows: int
    block: int
    warps: int


FORWARD, BACKWARD = Launch(32, 128, 8), Launch(32, 128, 8)
JOINS = False
"""Whether these kernels are used. Not before they have been measured to win (`benchmarks/kernels_lora.py`)."""


class Gated(NamedTuple):
    """What is known of an MLP beside its tensors."""

    gate_up: Frozen
    down: Frozen
    bias_G: Tensor | None
    bias_I: Tensor | None
    activation: str
    read: bool
    """Whether somebody reads the result, or only the gradients matter."""


def can_join(adapters: Sequence[LowRank], down: Sequence[LowRank], x: Tensor) -> bool:
    """Whether the kernels compute an MLP with these adapters: of gate and up, or of one layer for both, and of down."""
    if not JOINS or not runs_triton(x) or len(down) != 1 or x.dtype == torch.float32:
        return False
    ranks = {a.a_RI.shape[0] for a in adapters}
    width = sum(a.b_OR.shape[0] for a in adapters)
    largest = max([*ranks, down[0].a_RI.shape[0]], default=LARGEST_RANK + 1)
    return len(ranks) == 1 and largest <= LARGEST_RANK and width == 2 * down[0].a_RI.shape[1]


class _Thin(NamedTuple):
    """The adapters of gate and up as the kernels read them."""

    b_gate: Tensor
    b_up: Tensor
    scales: tuple[float, float]
    rank: int
    up_at: int
    """Column of h where up's begins; 0: gate and up share theirs."""


def _thin(bs: Sequence[Tensor], layout: _Layout, width: int) -> _Thin:
    rank = layout.ranks[0].stop
    if len(bs) == 1:
        return _Thin(bs[0][:width], bs[0][width:], (layout.scales[0], layout.scales[0]), rank, 0)
    return _Thin(bs[0], bs[1], (layout.scales[0], layout.scales[1]), rank, rank)


def _padded(rank: int) -> int:
    return max(SMALLEST_RANK, power_of_two_above(rank))


def _constants(thin: _Thin, h_TR: Tensor, width: int, activation: str, launch: Launch) -> dict[str, Any]:
    return {
        "WIDTH": width, "RANK": thin.rank, "R": _padded(thin.rank), "UP_AT": thin.up_at, "H_STRIDE": h_TR.shape[1],
        "ROWS": launch.rows, "BLOCK": launch.block, "ACTIVATION": activation,
        "num_warps": launch.warps,
    }  # fmt: skip


def _grid(rows: int, width: int, launch: Launch) -> tuple[int, int]:
    return -(-rows // launch.rows), -(-width // launch.block)


def _activate(x_TG: Tensor, h_TR: Tensor, thin: _Thin, activation: str) -> Tensor:
    """a, of g and u without their adapters."""
    from automodel.kernels.lora_mlp_triton import gated_forward_kernel

    T, width = x_TG.shape[0], x_TG.shape[1] // 2
    a_TF = x_TG.new_empty((T, width))
    gated_forward_kernel[_grid(T, width, FORWARD)](
        x_TG, h_TR, thin.b_gate, thin.b_up, a_TF, T, *thin.scales,
        **_constants(thin, h_TR, width, activation, FORWARD),
    )  # fmt: skip
    return a_TF


def _back_in_place(
    x_TG: Tensor, h_TR: Tensor, thin: _Thin, a_RF: Tensor, da_TF: Tensor, ud: Tensor, activation: str
) -> None:
    """Writes the gradients of gate and up over x, and a over its gradient, to which ud Ad is added first."""
    from automodel.kernels.lora_mlp_triton import gated_backward_kernel

    T, (down, width) = x_TG.shape[0], a_RF.shape
    gated_backward_kernel[_grid(T, width, BACKWARD)](
        x_TG, h_TR, thin.b_gate, thin.b_up, a_RF, da_TF, ud, T, *thin.scales,
        DOWN=down, RD=_padded(down), **_constants(thin, h_TR, width, activation, BACKWARD),
    )  # fmt: skip
    increment_version(x_TG)


class _LoraMlp(torch.autograd.Function):
    """Parameters: A of gate and up, B of gate and up, A and B of down."""

    @staticmethod
    def forward(
        ctx: Any, side: SideStream | None, how: Gated, layout: _Layout, scale: float, x_TI: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        count = len(layout.scales)
        a_RF, b_IR = parameters[-2:]
        inner_TG = how.gate_up.times(x_TI, how.bias_G)
        h_TR = x_TI @ _stacked(parameters[:count]).t()
        thin = _thin(parameters[count : 2 * count], layout, a_RF.shape[1])
        a_TF = _activate(inner_TG, h_TR, thin, how.activation)
        hd = a_TF @ a_RF.t()
        ctx.save_for_backward(x_TI, inner_TG, h_TR, hd)
        ctx.side, ctx.how, ctx.layout, ctx.scale, ctx.parameters = side, how, layout, scale, parameters
        ctx.set_materialize_grads(False)
        if not how.read:
            return x_TI.new_empty((x_TI.shape[0], how.down.outputs)), x_TI.view_as(x_TI)
        y_TI = how.down.times(a_TF, how.bias_I).addmm_(hd, b_IR.t(), alpha=scale)
        return y_TI, x_TI.view_as(x_TI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TI: Tensor, around_TI: Tensor | None):
        x_TI, inner_TG, h_TR, hd = ctx.saved_tensors
        how, layout, parameters = ctx.how, ctx.layout, ctx.parameters
        count = len(layout.scales)
        a_RIs, bs, (a_RF, b_IR) = parameters[:count], parameters[count : 2 * count], parameters[-2:]
        dy_TI = dy_TI.contiguous()
        ud = dy_TI.new_empty(hd.shape).addmm_(dy_TI, b_IR, beta=0, alpha=ctx.scale)
        a_TF = how.down.back(dy_TI)  # its gradient until the kernel has run
        thin = _thin(bs, layout, a_RF.shape[1])
        _back_in_place(inner_TG, h_TR, thin, a_RF, a_TF, ud, how.activation)

        def of_down() -> list[Tensor]:
            return [ud.t() @ a_TF, torch.empty_like(b_IR).addmm_(dy_TI.t(), hd, beta=0, alpha=ctx.scale)]

        down = gradients_by(ctx.side, (a_RF, b_IR), of_down, dy_TI, ud, a_TF, hd)
        dinner_TG = inner_TG.detach()
        u_TR = _up(dinner_TG, bs, layout)

        def of_gate_up() -> list[Tensor]:
            return _adapter_gradients(dinner_TG, u_TR, x_TI, h_TR, bs, layout)

        found = gradients_by(ctx.side, parameters[: 2 * count], of_gate_up, dinner_TG, u_TR, x_TI, h_TR)
        dx_TI = None
        if ctx.needs_input_grad[4]:
            dx_TI = how.gate_up.back(dinner_TG, around_TI).addmm_(u_TR, _stacked(a_RIs))
        return None, None, None, None, dx_TI, *found, *down


def lora_mlp(
    x_TI: Tensor, how: Gated, adapters: Sequence[LowRank], down: LowRank, side: SideStream | None = None
) -> tuple[Tensor, Tensor]:
    """(the MLP of x (T, I), x to go on with). `adapters` of gate and up, side by side. Only where `can_join`."""
    parameters = (*(a.a_RI for a in adapters), *(a.b_OR for a in adapters), down.a_RI, down.b_OR)
    return _LoraMlp.apply(side, how, _layout(adapters), down.scale, x_TI, *parameters)
