"""A frozen linear layer with a low-rank adapter beside it.

    y = x Wᵀ + b + s · (drop(x) Aᵀ) Bᵀ          s = alpha / r, or alpha / sqrt(r) (rsLoRA)

W and b are frozen, so the backward pass computes no gradient of W (a third of a full layer's products) and the base
product need not keep x at all: only the adapter does, once, as it read it.

    h  = drop(x) Aᵀ                 kept: (T, r) numbers, beside drop(x)
    u  = s · dy B
    dA = uᵀ drop(x)     dB = s · dyᵀ h     dx = dy W + undrop(u A)

The adapter's product is added to the base product in place (`addmm_`), forward and backward: no second (T, O) tensor is
written and read again. Without dropout there is one input, and its gradient is made the same way.

Legend: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from automodel.adapters.packed_linear import PackedLinear, is_plain_linear
from automodel.kernels.frozen import Expanding
from automodel.kernels.lora_linear import LowRank, lora_joined_linear


def lora_linear_reference(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
) -> Tensor:
    """What it computes, written plainly: the truth of the tests."""
    return F.linear(x, weight_OI, bias_O) + scale * F.linear(F.linear(x, a_RI), b_OR)


class _LoraLinear(torch.autograd.Function):
    """`dropped` is None where nothing is dropped: the adapter then reads `x` itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        dropped_TI: Tensor | None,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scale: float,
    ) -> Tensor:
        read_TI = x_TI if dropped_TI is None else dropped_TI
        hidden_TR = read_TI @ a_RI.t()
        y_TO = F.linear(x_TI, weight_OI, bias_O)
        y_TO.addmm_(hidden_TR, b_OR.t(), alpha=scale)
        ctx.save_for_backward(read_TI, hidden_TR, weight_OI, a_RI, b_OR)
        ctx.scale, ctx.drops = scale, dropped_TI is not None
        return y_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor):
        read_TI, hidden_TR, weight_OI, a_RI, b_OR = ctx.saved_tensors
        wants_x, wants_dropped, wants_weight, wants_bias, wants_a, wants_b, _ = ctx.needs_input_grad
        assert not wants_weight, "the weight under an adapter is frozen"
        up_TR = (dy_TO @ b_OR).mul_(ctx.scale)
        da_RI = up_TR.t() @ read_TI if wants_a else None
        db_OR = (dy_TO.t() @ hidden_TR).mul_(ctx.scale) if wants_b else None
        dbias_O = dy_TO.sum(0) if wants_bias else None
        dx_TI = dy_TO @ weight_OI if wants_x else None
        ddropped_TI = up_TR @ a_RI if ctx.drops and wants_dropped else None
        if dx_TI is not None and not ctx.drops:
            dx_TI.addmm_(up_TR, a_RI)
        return dx_TI, ddropped_TI, None, dbias_O, da_RI, db_OR, None


def lora_linear(
    x: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    a_RI: Tensor,
    b_OR: Tensor,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The product with its adapter. All tensors have one dtype; `dropout` is what is drawn here and now."""
    x_TI = x.reshape(-1, x.shape[-1])
    dropped_TI = F.dropout(x_TI, dropout, training=True) if dropout else None
    y_TO = _LoraLinear.apply(x_TI, dropped_TI, weight_OI, bias_O, a_RI, b_OR, scale)
    return y_TO.view(*x.shape[:-1], y_TO.shape[-1])


class LoraLinear(nn.Module):
    """Takes the place of a linear layer (or GPT-2's `Conv1D`, whose weight is transposed). Weight and bias stay the
    parameters they were, under their old names; `lora_A` and `lora_B` come beside them, in fp32."""

    def __init__(self, base: nn.Module, rank: int, scale: float, dropout: float):
        super().__init__()
        self.packed_base = base if isinstance(base, PackedLinear) else None
        """The layer itself, where its weight is in few bits."""
        self.transposed = not isinstance(base, nn.Linear | PackedLinear)
        self.weight_scale: Tensor | None = None
        """Of a weight in FP8."""
        self.weight: nn.Parameter = base.weight  # ty: ignore[invalid-assignment]
        self.bias: nn.Parameter | None = base.bias  # ty: ignore[invalid-assignment]
        self.in_features, self.out_features = sizes(base)
        self.rank, self.scale, self.dropout = rank, scale, dropout
        # A base whose weights come later has no memory yet; what is drawn has to have some.
        device = "cpu" if self.weight.is_meta else self.weight.device
        self.lora_A = nn.Parameter(torch.empty((rank, self.in_features), dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros((self.out_features, rank), dtype=torch.float32, device=device))
        self.training = base.training

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Random A and zero B, as PEFT has them: the adapter begins as nothing."""
        drawn = torch.empty(self.lora_A.shape)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        self.lora_A.copy_(drawn)
        self.lora_B.zero_()

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """Under autocast the product is half precision, as a plain linear layer's would be; A and B keep fp32
        masters."""
        kind = x.device.type
        own = self.weight.dtype if self.packed_base is None else self.packed_base.dtype
        own = own if self.weight_scale is None else x.dtype
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else own

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """The frozen weight (O, I)."""
        if self.packed_base is not None:
            return self.packed_base.packed.expand(dtype)
        if self.weight_scale is not None:
            return (self.weight.float() * self.weight_scale).to(dtype)
        return (self.weight.t() if self.transposed else self.weight).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype(x)
        if self.packed_base is not None:
            return self._expanded(x.to(dtype), dtype)
        if hasattr(self.weight, "placements"):  # cut over ranks, who sum what they make by the rules of DTensor
            bias = None if self.bias is None else self.bias.to(dtype)
            a, b = self.lora_A.to(dtype), self.lora_B.to(dtype)
            return lora_linear_reference(x.to(dtype), self.weight.to(dtype), bias, a, b, self.scale)
        bias = None if self.bias is None else self.bias.to(dtype)
        a, b = self.lora_A.to(dtype), self.lora_B.to(dtype)
        dropout = self.dropout if self.training else 0.0
        return lora_linear(x.to(dtype), self.expanded(dtype), bias, a, b, self.scale, dropout)

    def _expanded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """With a weight that exists for the length of a product."""
        assert self.packed_base is not None
        x_TI = x.reshape(-1, x.shape[-1])
        dropped_TI = F.dropout(x_TI, self.dropout) if self.dropout and self.training else None
        adapter = LowRank(self.lora_A.to(dtype), self.lora_B.to(dtype), self.scale)
        bias = None if self.bias is None else self.bias.to(dtype)
        base = Expanding([self.packed_base.packed], dtype)
        return lora_joined_linear(x_TI, base, bias, [adapter], None, dropped_TI)[0].view(*x.shape[:-1], -1)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weight with the adapter added, in the weight's own shape; added up in fp32."""
        update_OI = self.scale * (self.lora_B.float() @ self.lora_A.float())
        total = self.weight.float() + (update_OI.t() if self.transposed else update_OI)
        return total.to(self.weight.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, scale={self.scale:g}"


def is_linear(module: nn.Module) -> bool:
    """What an adapter can stand beside: a plain linear layer, a packed one, and the transposed one of GPT-2."""
    if is_plain_linear(module) or type(module) is PackedLinear:
        return True
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def sizes(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    if isinstance(module, PackedLinear):
        return module.in_features, module.out_features
    rows, columns = module.weight.shape  # ty: ignore[not-iterable]
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)
