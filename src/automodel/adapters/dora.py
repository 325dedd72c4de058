"""DoRA: a frozen linear layer, an adapter, and the lengths of the rows of both together, trained apart.

    V = W + s B A          y = (m / ‖V‖) · (x Wᵀ + s (x Aᵀ) Bᵀ) + b          ‖V‖: lengths of the rows, not learned from

(Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024.) m begins as ‖W‖, so that the layer begins as it was.
As in PEFT, the lengths are constants to the backward pass, and with dropout the scale reaches the base product of what
was dropped: y = x Wᵀ + b + (m/‖V‖ − 1) · drop(x) Wᵀ + (m/‖V‖) · s (drop(x) Aᵀ) Bᵀ.

V itself, as large as the weight, is never made:

    ‖V‖² = ‖W‖² + 2 s Σ (W Aᵀ ∘ B) + s² Σ (B A Aᵀ ∘ B)          sums over the rank; ‖W‖² is kept

Legend: O outputs, I inputs, R rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel.adapters.lora import LoraLinear, lora_linear

MAGNITUDE = "lora_magnitude_vector"


def row_lengths(squares_O: Tensor, weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """‖W + s B A‖ of each row, fp32; `squares_O`: ‖W‖² of each."""
    a, b = a_RI.float(), b_OR.float()
    across_OR = (weight_OI @ a_RI.to(weight_OI.dtype).t()).float()
    added_O = 2.0 * scale * (across_OR * b).sum(1) + scale**2 * ((b @ (a @ a.t())) * b).sum(1)
    return (squares_O + added_O).clamp(min=0.0).sqrt()


class DoraLinear(LoraLinear):
    def __init__(self, base: nn.Module, rank: int, scale: float, dropout: float):
        super().__init__(base, rank, scale, dropout)
        later = self.weight.is_meta  # `measure` is told the weight when it is read
        squares_O = torch.zeros(self.out_features) if later else self.expanded(torch.float32).square().sum(1)
        self.register_buffer("squares", squares_O, persistent=False)
        self.lora_magnitude_vector = nn.Parameter(squares_O.sqrt())

    @torch.no_grad()
    def measure(self, weight: Tensor, begins: bool) -> None:
        """The lengths of the rows of a weight that this layer does not hold itself yet. `begins`: the trained lengths
        begin with them."""
        weight_OI = weight.t() if self.transposed else weight
        self.squares = weight_OI.float().square().sum(1)
        if begins:
            self.lora_magnitude_vector.copy_(self.squares.sqrt())

    @torch.no_grad()
    def _rows(self, weight_OI: Tensor) -> Tensor:
        return row_lengths(self.squares, weight_OI, self.lora_A, self.lora_B, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype(x)
        x, weight_OI = x.to(dtype), self.expanded(dtype)
        a, b = self.lora_A.to(dtype), self.lora_B.to(dtype)
        scale_O = self.lora_magnitude_vector / self._rows(weight_OI)
        bias = 0.0 if self.bias is None else self.bias.to(dtype)
        if not (self.dropout and self.training):
            return scale_O.to(dtype) * lora_linear(x, weight_OI, None, a, b, self.scale) + bias
        dropped = F.dropout(x, self.dropout)
        added = (scale_O - 1.0).to(dtype) * F.linear(dropped, weight_OI)
        added = added + scale_O.to(dtype) * self.scale * F.linear(F.linear(dropped, a), b)
        return F.linear(x, weight_OI) + added + bias

    @torch.no_grad()
    def merged(self) -> Tensor:
        weight_OI = self.expanded(torch.float32)
        total = weight_OI + self.scale * (self.lora_B.float() @ self.lora_A.float())
        total = total * (self.lora_magnitude_vector.float() / total.norm(dim=1))[:, None]
        return (total.t() if self.transposed else total).to(self.weight.dtype)
