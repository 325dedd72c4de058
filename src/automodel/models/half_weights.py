"""16-bit copies of fp32 weights for one call under autocast.

Autocast rounds each weight where it meets a product, and fused blocks cannot look into that. So for one call the model
gets rounded copies of all its weights, in the places of its parameters; gradients come back through the rounding to the
parameters, in fp32, layer by layer. That is what a run of ours in bf16 does, too: fp32 masters, 16-bit compute, and a
16-bit residual stream (autocast itself leaves the stream in fp32).

Weights that one product reads come to lie side by side in the copy, so the parameters stay where they are. The copy is
made anew in every call: nothing can be out of date, and memory goes back after the backward pass.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from automodel.models.fuse import layers_of

ALIGNED = 128  # elements; kernels load wide


class Unit(NamedTuple):
    """Parameters that are copied together."""

    parameters: list[nn.Parameter]
    starts: list[int]
    """Places in the copy."""
    size: int


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: Unit, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [p.dtype for p in parameters]
        copy = torch.empty(unit.size, dtype=dtype, device=parameters[0].device)
        places = [copy[start : start + p.numel()].view(p.shape) for start, p in zip(unit.starts, parameters)]
        torch._foreach_copy_(places, list(parameters))
        return tuple(places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None):
        return None, None, *(None if g is None else g.to(d) for g, d in zip(gradients, ctx.dtypes))


def units_of(model: Any, neighbours: Sequence[Sequence[nn.Parameter]]) -> list[Unit]:
    """Each layer is a unit, and so is every other parameter. `neighbours` come to lie next to each other."""
    rest = {id(p): p for p in model.parameters()}
    units = []
    for layer in layers_of(model):
        own = [p for p in layer.parameters() if rest.pop(id(p), None) is not None]
        units.append(_unit(own, neighbours))
    return units + [_unit([p], ()) for p in rest.values()]


def _unit(own: Sequence[nn.Parameter], neighbours: Sequence[Sequence[nn.Parameter]]) -> Unit:
    here = {id(p): p for p in own}
    groups = [list(group) for group in neighbours if id(group[0]) in here]
    for group in groups:
        for parameter in group:
            del here[id(parameter)]
    parameters, starts, end = [], [], 0
    for group in [*groups, *([p] for p in here.values())]:
        end = -(-end // ALIGNED) * ALIGNED
        for parameter in group:
            parameters.append(parameter)
            starts.append(end)
            end += parameter.numel()
    return Unit(parameters, starts, end)


@contextmanager
def half_weights(model: Any, units: Sequence[Unit], dtype: torch.dtype) -> Generator[None]:
    """Rounded copies in the places of the parameters, and autocast off, inside the block."""
    copies: dict[int, Tensor] = {}
    for unit in units:
        rounded = _Rounded.apply(unit, dtype, *unit.parameters)
        copies |= {id(p): copy for p, copy in zip(unit.parameters, rounded)}
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    for module, name, parameter in places:
        module._parameters[name] = copies[id(parameter)]
    try:
        with torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
