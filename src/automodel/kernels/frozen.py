"""Weights that are not trained, and the two products they take part in.

    y  = x Wᵀ + b               forward
    dx = dy W  (+ onto)         backward; there is no gradient of W, a third of a trained layer's arithmetic

How such a weight is held is nobody's business but its own: as it is (`Held`), in FP8 (`Fp8Held`), in 4 or 8 bits that
are expanded for each product (`Expanding`, of `packed.py`). Adapters (`lora_linear.py`) know these two
products and nothing else.

Shapes: T rows, I inputs, O outputs of all layers of a joined product together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel.kernels.fp8 import E4M3, E5M2, product, quantise
from automodel.kernels.packed import Packed
from automodel.kernels.with_room import with_room


class Frozen(Protocol):
    """A matrix (O, I) that is not trained."""

    outputs: int

    def weight(self) -> Tensor:
        """The matrix as it is multiplied with."""
        ...

    def times(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x Wᵀ + b, a new tensor."""
        ...

    def back(self, dy_TO: Tensor, onto_TI: Tensor | None = None) -> Tensor:
        """dy W, added to `onto` in place where that is given."""
        ...


class Held:
    """The weight in the dtype that it is computed in."""

    def __init__(self, weight_OI: Tensor):
        self.weight_OI = weight_OI.detach()
        self.outputs = weight_OI.shape[0]

    def weight(self) -> Tensor:
        return self.weight_OI

    def times(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x_TI, self.weight_OI, bias_O)

    def back(self, dy_TO: Tensor, onto_TI: Tensor | None = None) -> Tensor:
        return dy_TO @ self.weight_OI if onto_TI is None else onto_TI.addmm_(dy_TO, self.weight_OI)


ROOM = 64
"""Columns or rows for adapters come in multiples of this: products walk along the summed dimension in such steps, and
rows begin on whole lines of the cache."""


def _room(rank: int) -> int:
    return -(-rank // ROOM) * ROOM


class Beside(Held):
    """The weight with columns beside it for the adapters' B, so that what they add is part of the product:

        y = [x  s h  0] [W  B  0]ᵀ          B: the layers' own, one below the other, zero outside of their columns

    instead of a pass over y that reads and writes it. x and s h have to lie side by side for that, which is a copy of
    x: less than the pass where y is wider.

    It is also one rounding instead of two. Added to a y that is rounded already, the small numbers that adapters begin
    with are lost in bf16: at a learning rate of 2e-5 the loss of Qwen3-8B went from 12.287 to 12.216 in the first step
    that way, which is PEFT's, and to 12.156 this way, from the same gradients."""

    def __init__(self, weights: Sequence[Tensor], rank: int):
        """`weights` (one below the other) become views of the new memory."""
        self.inputs, outputs = weights[0].shape[1], sum(w.shape[0] for w in weights)
        shape = (outputs, self.inputs + _room(rank))
        self.joined = torch.zeros(shape, dtype=weights[0].dtype, device=weights[0].device)
        first = 0
        for weight in weights:
            rows = self.joined[first : first + weight.shape[0], : self.inputs]
            rows.copy_(weight.detach())
            weight.data = rows
            first += weight.shape[0]
        super().__init__(self.joined[:, : self.inputs])

    def times_both(
        self,
        x_TI: Tensor,
        a_RI: Tensor,
        scale: float,
        places: Sequence[tuple[slice, slice, Tensor]],
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(y with what the adapters add, x as it lies beside s h, s h). `places`: columns of y, ranks and B of each."""
        rank = a_RI.shape[0]
        both_TK = with_room(x_TI, self.inputs + rank, self.joined.shape[1])
        read_TI, h_TR = both_TK[:, : self.inputs], both_TK[:, self.inputs : self.inputs + rank]
        h_TR.addmm_(read_TI, a_RI.t(), beta=0, alpha=scale)
        for columns, ranks, b_OR in places:
            self.joined[columns, self.inputs + ranks.start : self.inputs + ranks.stop].copy_(b_OR)
        return F.linear(both_TK, self.joined, bias), read_TI, h_TR


class Below(Held):
    """The weight with rows below it for the adapter's A, so that the backward product has its part in it:

        dx = [dy  u  0] [W; A; 0]

    instead of a pass over dx. Pays where x is wider than y, since dy has to be copied beside u."""

    def __init__(self, weight: Tensor, rank: int):
        """`weight` becomes a view of the new memory."""
        rows = weight.shape[0]
        self.joined = torch.zeros((rows + _room(rank), weight.shape[1]), dtype=weight.dtype, device=weight.device)
        self.joined[:rows].copy_(weight.detach())
        weight.data = self.joined[:rows]
        super().__init__(self.joined[:rows])

    def back_both(self, dy_TO: Tensor, b_OR: Tensor, a_RI: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(dx with the adapter's part, u)."""
        end = self.outputs + a_RI.shape[0]
        both_TK = with_room(dy_TO, end, self.joined.shape[0])
        u_TR = both_TK[:, self.outputs : end].addmm_(dy_TO, b_OR, beta=0, alpha=scale)
        self.joined[self.outputs : end].copy_(a_RI)
        return both_TK @ self.joined, u_TR


class Fp8Held:
    """The weight in 8 bits, as it lies and transposed: both products want the summed dimension last in memory. It is
    quantised once; x and dy in every step. The two copies together are as large as the bf16 weight, which nobody needs
    any more."""

    def __init__(self, weight_OI: Tensor):
        made = quantise(weight_OI.detach(), E4M3)
        assert made.rows_TI is not None
        assert made.columns_IP is not None
        self.rows_OI, self.columns_IO, self.scale = made.rows_TI, made.columns_IP, made.scale
        self.outputs, self.dtype = weight_OI.shape[0], weight_OI.dtype

    def weight(self) -> Tensor:
        return (self.rows_OI.float() * self.scale).to(self.dtype)

    def times(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        x = quantise(x_TI, E4M3, columns=False)
        assert x.rows_TI is not None
        return product(x.rows_TI, self.rows_OI, x.scale, self.scale, dtype=self.dtype, bias=bias_O, fast=True)

    def back(self, dy_TO: Tensor, onto_TI: Tensor | None = None) -> Tensor:
        d = quantise(dy_TO, E5M2, columns=False)
        assert d.rows_TI is not None
        # Sums of dx run over outputs, a few thousand; the gradients of adapters, over all tokens, are not made in FP8.
        dx_TI = product(d.rows_TI, self.columns_IO, d.scale, self.scale, dtype=self.dtype, fast=True)
        return dx_TI if onto_TI is None else onto_TI.add_(dx_TI)


class Expanding:
    """Weights in 4 or 8 bits, expanded for each product and forgotten: the memory of one product at a time. `parts`:
    the layers of a joined product, each packed by itself."""

    def __init__(self, parts: Sequence[Packed], dtype: torch.dtype):
        self.parts, self.dtype = parts, dtype
        self.outputs = sum(part.shape[0] for part in parts)

    def weight(self) -> Tensor:
        first = self.parts[0]
        shape = (self.outputs, first.shape[1])
        weight_OI = torch.empty(shape, dtype=self.dtype, device=first.codes.device)
        for part, rows in zip(self.parts, weight_OI.split([part.shape[0] for part in self.parts])):
            part.expand(self.dtype, rows)
        return weight_OI

    def times(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x_TI, self.weight(), bias_O)

    def back(self, dy_TO: Tensor, onto_TI: Tensor | None = None) -> Tensor:
        return dy_TO @ self.weight() if onto_TI is None else onto_TI.addmm_(dy_TO, self.weight())


def same_memory(tensors: list[Tensor]) -> Tensor:
    """Matrices of one width below each other in new memory, which each of them is then a view of."""
    joined = torch.cat([t.detach() for t in tensors])
    first = 0
    for tensor in tensors:
        tensor.data = joined[first : first + tensor.shape[0]]
        first += tensor.shape[0]
    return joined
