"""The gated half of a decoder's MLP, and the product behind it.

    a = act(gate) · up,   [gate up] = x        act: silu (Llama, Qwen, …), gelu by tanh (Gemma) or exact
    y = a Wᵀ + b

Both halves come side by side out of one GEMM. Forward, act and product are one kernel that reads x once. Backward,

    dgate = da · up · act'(gate)          dup = da · act(gate)          dW = dyᵀ a          da = dy W

`swiglu_linear` joins the product to the activation for the sake of memory. A layer of its own would have to keep a for
dW, a third of all the MLP stores. Here only x is kept: the backward kernel, which reads x and da anyway, writes a over
da and both gradients over x. So the backward pass needs no buffers but da, and one write of a more than usual.

Where there are few tokens and much memory, a may be kept all the same (`keep`): 360 MB of 12 GB for Llama 1B at 1,400
tokens, and a sixth of the kernel's time less (37.4 to 30.7 µs).

What is written over was saved for this pass and nobody else reads it: x is the output of a product, which does not need
it. Its version is counted up, so that a second backward pass over the same graph is refused instead of being wrong.

Shapes: T rows, F inner width, G = 2F, N outer width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from automodel.kernels.column_sum import rows_sum
from automodel.kernels.dispatch import power_of_two_above, runs_triton
from automodel.kernels.side_stream import SideStream, gradients_by
from automodel.kernels.weight_gradient import weight_gradient

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def swiglu_reference(x: Tensor, activation: str = "silu") -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def swiglu_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu") -> Tensor:
    return F.linear(swiglu_reference(x, activation), weight, bias)


class Launch(NamedTuple):
    """32 elements a thread: a column block that divides the width where one does, and enough rows."""

    block: int
    rows: int
    warps: int


@functools.cache
def launch_shape(width: int) -> Launch:
    block = next((b for b in (1024, 512, 256) if width % b == 0), min(512, power_of_two_above(width)))
    rows = max(1, min(16, 4096 // block))
    return Launch(block, rows, max(1, block * rows // 1024))


def _forward(x_TG: Tensor, activation: str) -> Tensor:
    from automodel.kernels.swiglu_triton import swiglu_forward_kernel

    T, width = x_TG.shape[0], x_TG.shape[1] // 2
    a_TF = torch.empty((T, width), dtype=x_TG.dtype, device=x_TG.device)
    shape = launch_shape(width)
    swiglu_forward_kernel[(-(-width // shape.block) * -(-T // shape.rows),)](
        x_TG, a_TF, T,
        WIDTH=width, BLOCK=shape.block, ROWS=shape.rows, ACTIVATION=activation, num_warps=shape.warps,
    )  # fmt: skip
    return a_TF


def _backward_in_place(x_TG: Tensor, da_TF: Tensor, activation: str, again: bool) -> None:
    """Writes the gradient of x over x and, where it is needed `again`, act(gate) · up over da."""
    from automodel.kernels.swiglu_triton import swiglu_backward_kernel

    T, width = da_TF.shape
    shape = launch_shape(width)
    swiglu_backward_kernel[(-(-width // shape.block) * -(-T // shape.rows),)](
        x_TG, da_TF, T,
        WIDTH=width, BLOCK=shape.block, ROWS=shape.rows, ACTIVATION=activation, AGAIN=again, num_warps=shape.warps,
    )  # fmt: skip
    increment_version(x_TG)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TG: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(x_TG)
        ctx.activation = activation
        return _forward(x_TG, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, da_TF: Tensor):
        (x_TG,) = ctx.saved_tensors
        _backward_in_place(x_TG, da_TF.contiguous(), ctx.activation, again=False)
        return x_TG.detach(), None


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TG: Tensor,
        weight_NF: Tensor,
        bias_N: Tensor | None,
        activation: str,
        side: SideStream | None,
        read: bool,
        keep: bool,
    ) -> Tensor:
        ctx.activation, ctx.side = activation, side
        ctx.parameters = [p for p in (weight_NF, bias_N) if p is not None]
        a_TF = _forward(x_TG, activation) if read else None
        ctx.save_for_backward(x_TG, weight_NF, a_TF if keep else None)
        if a_TF is None:
            return x_TG.new_empty((x_TG.shape[0], weight_NF.shape[0]))
        return F.linear(a_TF, weight_NF, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor):
        x_TG, weight_NF, kept_TF = ctx.saved_tensors
        dy_TN = dy_TN.contiguous()
        a_TF = dy_TN @ weight_NF  # da until the kernel has run
        _backward_in_place(x_TG, a_TF, ctx.activation, again=kept_TF is None)
        a_TF = a_TF if kept_TF is None else kept_TF

        def gradients() -> list[Tensor]:
            found = [weight_gradient(dy_TN, a_TF, [weight_NF])]
            return found if len(ctx.parameters) == 1 else [*found, rows_sum(dy_TN)]

        dweight, *dbias = gradients_by(ctx.side, ctx.parameters, gradients, dy_TN, a_TF)
        return x_TG.detach(), dweight, (dbias[0] if dbias else None), None, None, None, None


def _check(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"the activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def swiglu(x: Tensor, activation: str = "silu") -> Tensor:
    """act(first half) · second half of x (…, 2F). x must not be read by anyone after this: its gradient is written over
    it."""
    _check(activation)
    if not runs_triton(x):
        return swiglu_reference(x, activation)
    return _SwiGLU.apply(x.reshape(-1, x.shape[-1]).contiguous(), activation).view(*x.shape[:-1], x.shape[-1] // 2)


def swiglu_linear(
    x_TG: Tensor,
    weight_NF: Tensor,
    bias_N: Tensor | None = None,
    activation: str = "silu",
    side: SideStream | None = None,
    read: bool = True,
    keep: bool = False,
) -> Tensor:
    """(act(first half) · second half of x) Wᵀ + b, (T, N). As for `swiglu`, nobody else may read x. side: where the
    gradients of weight and bias, both leaves, are computed. read: false where only the gradients matter, since nobody
    will look at the result (`recompute.py`); it may then be anything. keep: what the product reads stays in memory."""
    _check(activation)
    if not runs_triton(x_TG):
        return swiglu_linear_reference(x_TG, weight_NF, bias_N, activation)
    return _SwiGLULinear.apply(x_TG.contiguous(), weight_NF, bias_N, activation, side, read, keep)
