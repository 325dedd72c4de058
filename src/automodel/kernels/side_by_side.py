"""Matrices that lie next to each other in memory, as one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def joined_view(parameters: Sequence[Tensor]) -> Tensor | None:
    """One (ΣO, I) tensor over matrices that lie next to each other in one storage; None where they do not."""
    first = parameters[0]
    storage, expected = first.untyped_storage().data_ptr(), first.data_ptr()
    for parameter in parameters:
        # An allocator may well put two storages next to each other; a view cannot reach from one into the other.
        if parameter.untyped_storage().data_ptr() != storage:
            return None
        if parameter.data_ptr() != expected or not parameter.is_contiguous():
            return None
        expected += parameter.numel() * parameter.element_size()
    rows = sum(p.shape[0] for p in parameters)
    return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1))


def fixed_place(weights: Sequence[Tensor]) -> Tensor | None:
    """Where the optimizer wants the gradients of these layers, if it wants them somewhere and side by side."""
    places: list[Tensor] = [w.__dict__["gradient_place"] for w in weights if "gradient_place" in w.__dict__]
    return joined_view(places) if len(places) == len(weights) else None
