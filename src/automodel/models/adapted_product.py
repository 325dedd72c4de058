"""The products of a fused decoder block whose weights are frozen, with the adapters that stand beside them.

`kernels/lora_linear.py` computes; here a block's modules are turned into what it takes: the frozen matrix of a joined
product, and the A and B of those of its layers that have them. Weights of one product are brought together once
(`join_frozen`): they are not in the optimizer's flat buffer, where trained ones are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel.adapters.attach import adapter_of
from automodel.adapters.lora import LoraLinear
from automodel.adapters.packed_linear import PackedLinear
from automodel.kernels.frozen import Below, Beside, Expanding, Frozen, Held, same_memory
from automodel.kernels.lora_linear import LowRank, lora_joined_linear, lora_swiglu_linear
from automodel.kernels.packed import Packed
from automodel.kernels.side_by_side import joined_view
from automodel.kernels.side_stream import SideStream
from automodel.kernels.swiglu import swiglu


def can_fuse_adapter(model: Any) -> bool:
    """Whether fused blocks compute this model's adapter: plain low-rank products beside frozen layers."""
    adapter = adapter_of(model)
    if adapter is None or adapter.dora:
        return False
    own = {id(p) for m in model.modules() if isinstance(m, LoraLinear) for p in (m.lora_A, m.lora_B)}
    return not any(p.requires_grad and id(p) not in own for p in model.model.layers.parameters())


def is_frozen(linear: Any) -> bool:
    return not linear.weight.requires_grad


@torch.no_grad()
def join_frozen(linears: Sequence[Any]) -> None:
    """Weights of one product become neighbours in memory, where they are frozen and are not neighbours yet."""
    weights = [linear.weight for linear in linears]
    if all(is_frozen(m) and packed_of(m) is None for m in linears) and joined_view(weights) is None:
        same_memory(weights)


@torch.no_grad()
def put_beside(linears: Sequence[Any]) -> Frozen | None:
    """The frozen weights of joined layers in memory with room for their adapters; None where that is not for them."""
    adapters = low_ranks(linears)
    alike = len({a.scale for a in adapters}) == 1 and all(_is_plain(m) and is_frozen(m) for m in linears)
    rank = sum(a.a_RI.shape[0] for a in adapters)
    if len(linears) < 2 or not alike or rank % 8:  # what is written there are whole 16 bytes
        return None
    return Beside([m.weight for m in linears], rank)


@torch.no_grad()
def put_below(linear: Any) -> Frozen | None:
    """The frozen weight of down in memory with room for its adapter; None where that is not for it."""
    adapters = low_ranks((linear,))
    if not adapters or not _is_plain(linear) or adapters[0].a_RI.shape[0] % 8:
        return None
    return Below(linear.weight, adapters[0].a_RI.shape[0])


def _is_plain(linear: Any) -> bool:
    """Whether the weight is its own, and not one in few bits, packed or expanded: whether there was memory for the
    expanded one decides about speed, and must not decide about the last digit."""
    return packed_of(linear) is None and not getattr(linear.weight, "expanded", False)


def packed_of(linear: Any) -> Packed | None:
    """The weight in 4 or 8 bits, where it is."""
    base = linear.packed_base if isinstance(linear, LoraLinear) else linear
    return base.packed if isinstance(base, PackedLinear) else None


def lie_together(linears: Sequence[Any]) -> bool:
    """Whether one product can read all of them."""
    packed = [packed_of(m) is not None for m in linears]
    return all(packed) or (not any(packed) and joined_view([m.weight for m in linears]) is not None)


def frozen_base(linears: Sequence[Any], held: Frozen | None, dtype: torch.dtype) -> Frozen:
    """The frozen matrix of a joined product; `held`: in another form than its weights, all of them together."""
    if held is not None:
        assert held.outputs == sum(m.out_features for m in linears), "a joined product in 8 bits cannot be taken apart"
        return held
    packed = [p for p in map(packed_of, linears) if p is not None]
    if packed:
        assert len(packed) == len(linears), "a joined product is packed as a whole"
        return Expanding(packed, dtype)
    joined = joined_view([m.weight for m in linears])
    assert joined is not None, "the weights of one product were moved apart after the model was fused"
    return Held(joined)


def low_ranks(linears: Sequence[Any]) -> list[LowRank]:
    """The adapters of a product's layers, in the order of their columns."""
    found, first = [], 0
    for linear in linears:
        if isinstance(linear, LoraLinear):
            found.append(LowRank(linear.lora_A, linear.lora_B, linear.scale, first))
        first += linear.out_features
    return found


def _dropped(x: Tensor, linears: Sequence[Any]) -> Tensor | None:
    share = max((m.dropout for m in linears if isinstance(m, LoraLinear) and m.training), default=0.0)
    return F.dropout(x, share) if share else None


def _bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    biases: list[Tensor] = [m.bias for m in linears if m.bias is not None]
    return None if not biases else (biases[0] if len(biases) == 1 else torch.cat(biases))


def adapted_product(
    x: Tensor, linears: Sequence[Any], held: Frozen | None, side: SideStream | None
) -> tuple[Tensor, Tensor]:
    """(all layers' outputs side by side, x to go on with)."""
    base = frozen_base(linears, held, x.dtype)
    return lora_joined_linear(x, base, _bias(linears), low_ranks(linears), side, _dropped(x, linears))


def adapted_mlp(
    x: Tensor,
    gate_up: Sequence[Any],
    down: Any,
    held: Mapping[int, Frozen],
    activation: str,
    side: SideStream | None,
    read: bool,
) -> tuple[Tensor, Tensor]:
    """(the gated MLP of x, x to go on with). `read`: whether somebody looks at the result."""
    inner, around = adapted_product(x, gate_up, held.get(id(gate_up[0])), side)
    return adapted_down(inner, down, held.get(id(down)), activation, side, read), around


def adapted_down(
    x: Tensor, down: Any, held: Frozen | None, activation: str, side: SideStream | None, read: bool
) -> Tensor:
    """The gated activation of x, through the last product of the MLP."""
    if isinstance(down, LoraLinear) and down.training and down.dropout:
        return adapted_product(swiglu(x, activation), (down,), held, side)[0]
    adapters = low_ranks((down,))
    adapter = adapters[0] if adapters else None
    return lora_swiglu_linear(x, frozen_base((down,), held, x.dtype), down.bias, activation, adapter, side, read)
