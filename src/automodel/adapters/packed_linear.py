"""Frozen linear layers whose weights are in 4 or 8 bits (`kernels/packed.py`), and how a model gets them.

`pack_layers` takes one layer after the other to the device, packs it there and lets go of the wide weight, so that the
device never holds more of those than one; nor does the host, where weights are read from their files one by one. Layers
that are `resident` are expanded again at once and stay plain linear layers: the very numbers that the packed ones have,
at the speed of bf16, for four times the memory.

Left as they are: the head of a language model, whose logits decide on the loss, and modules that are trained in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automodel.adapters.config import Packing
from automodel.config.errors import UserError
from automodel.kernels.frozen import Expanding
from automodel.kernels.lora_linear import lora_joined_linear
from automodel.kernels.packed import Packed, pack


class PackedLinear(nn.Module):
    """Takes the place of a linear layer. `weight` holds the codes, which are neither trained nor saved."""

    def __init__(self, packed: Packed, bias: nn.Parameter | None, dtype: torch.dtype):
        super().__init__()
        self.kind, self.dtype = packed.kind, dtype
        self.out_features, self.in_features = packed.shape
        self.weight = nn.Parameter(packed.codes, requires_grad=False)
        self.bias = bias
        for name in ("scales", "wide_scales", "mean"):
            self.register_buffer(name, getattr(packed, name), persistent=False)

    @property
    def packed(self) -> Packed:
        shape, scales = (self.out_features, self.in_features), (self.scales, self.wide_scales, self.mean)
        return Packed(self.kind, shape, self.weight.detach(), *scales)  # ty: ignore[invalid-argument-type]

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        flat_TI = x.reshape(-1, x.shape[-1]).to(dtype)
        return lora_joined_linear(flat_TI, Expanding([self.packed], dtype), bias, ())[0].view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kind}"


def is_plain_linear(module: nn.Module) -> bool:
    """`nn.Linear`, or Falcon's class of its own, which computes the same."""
    kind = type(module)
    return kind is nn.Linear or (kind.__name__ == "FalconLinear" and kind.__module__.startswith("transformers."))


def packable(model: Any, kept: Sequence[str]) -> list[str]:
    """Names of the layers that are packed: every linear one but the head and what lies in the modules `kept`."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if is_plain_linear(module)
        and module is not head
        and not any(name == other or name.startswith(f"{other}.") for other in kept)
    ]


@torch.no_grad()
def pack_layers(
    model: Any,
    packing: Packing,
    device: Any,
    dtype: torch.dtype,
    kept: Sequence[str],
    read: Callable[[str], Tensor] | None = None,
) -> list[str]:
    """Packs the layers of a model that was loaded on the host, on their way to the device; the rest follows as it is.
    Returns the names of the packed layers. `dtype`: what they are expanded to. `read` gives a parameter by its name,
    for a model without memory, whose rest is then left to the caller."""
    names = packable(model, kept)
    if not names:
        raise UserError(f"quantization: {type(model).__name__} has no linear layers that could be packed. Remove it.")
    find = read or (lambda name: model.get_parameter(name).detach())
    for name in names:
        linear = model.get_submodule(name)
        packed = pack(find(f"{name}.weight").to(device), packing.kind, packing.double)
        bias = None if linear.bias is None else nn.Parameter(find(f"{name}.bias").to(device, dtype), False)
        if packing.resident:
            linear.weight = nn.Parameter(packed.expand(dtype), requires_grad=False)
            linear.weight.expanded = True  # ty: ignore[missing-attribute]
            linear.bias = bias
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PackedLinear(packed, bias, dtype).train(linear.training))
    if read is None:
        model.to(device)
    return names
