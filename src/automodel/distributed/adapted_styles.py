"""How a linear layer with an adapter is cut: as the layer, with one half of the adapter beside it.

    colwise (by outputs)     W and B by rows; A whole: every rank makes the same x Aᵀ and its own outputs of it
    rowwise (by inputs)      W and A by columns; B whole: ranks make parts of x Aᵀ, summed with the rest of the product

The half that stays whole has a part of its gradient on each rank; FSDP2 sums it when it takes the gradients over.
Layers are known by their parameters (`lora_A`, `lora_B`): the room of adapters is above this one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

COLWISE: dict[str, Any] = {"weight": Shard(0), "bias": Shard(0), "lora_A": Replicate(), "lora_B": Shard(0)}
ROWWISE: dict[str, Any] = {"weight": Shard(1), "bias": Replicate(), "lora_A": Shard(1), "lora_B": Replicate()}


def has_adapter(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "lora_B")


def _cut(placements: dict[str, Any], _: str, module: nn.Module, mesh: Any) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        cut = distribute_tensor(parameter.detach(), mesh, [placements[key]])
        module.register_parameter(key, nn.Parameter(cut, parameter.requires_grad))


def _distributed(style: Any, placements: dict[str, Any], module: nn.Module, mesh: Any) -> nn.Module:
    before = partial(style._prepare_input_fn, style.input_layouts, style.desired_input_layouts)
    after = partial(style._prepare_output_fn, style.output_layouts, style.use_local_output)
    return distribute_module(module, mesh, partial(_cut, placements), before, after)


class AdaptedColwise(ColwiseParallel):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return _distributed(self, COLWISE, module, device_mesh)


class AdaptedRowwise(RowwiseParallel):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        self.desired_input_layouts = (Shard(-1),)
        return _distributed(self, ROWWISE, module, device_mesh)
