"""The gradient of a weight, and the squares of its elements on the way.

    dW = dyᵀ x          Σ dW²

The norm of all gradients is wanted before AdamW reads the first of them, so each is read once more for its squares: 2.5
GB a step for Llama 1B. On an H200, steps of 1,400 tokens are limited by power (693 of 700 W, 1,650 of 1,980 MHz), and
what is not read from memory saves time and leaves energy to the products. So up to `MOST_TOKENS` squares are summed up
where the gradient is made. A product that makes full rounds of tiles does it itself, from its accumulators; behind
another one, torch's, a pass follows while the result lies in the cache.

µs for product and squares at 1,408 tokens, in loops that last (torch's with a pass → ours): 2,048 → 16,384 169 → 157;
8,192 → 2,048 87 → 79; 2,048 → 2,048 23.1 → 21.5; 2,048 → 3,072, whose second round is half empty, 35.0 → 36.0. torch's
product alone is 5 % faster than ours: at 3,072 tokens 338 → 321, and 973 → 978 for 4,096 → 24,576, so it ends there. In
a step of Llama 1B (pure bf16, 1,408 tokens, in turns on one machine) 23.55 and 23.58 ms become 23.26 and 23.24.

The kernel: one program a processor takes tiles of 128 × 256 in turn, which the tensor memory engine loads in steps of
64 tokens, four of them ahead. The loop over tiles and steps is one, so the next tile's first loads are under way while
the last one is stored, in halves, for want of shared memory. Squares are those of the rounded gradient, which is what
somebody who reads it would find.

Shapes: T tokens, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from automodel.kernels.dispatch import HOPPER, capability, processors, runs_triton
from automodel.kernels.flat_parameters import BLOCK
from automodel.kernels.side_by_side import fixed_place
from automodel.kernels.square_sums import UNIT, SquareSums, run_programs, sum_run, whole_units

MOST_TOKENS = 3072
TILE_O, TILE_I, STEP = 128, 256, 64
WARPS, STAGES = 8, 4
FULL_ROUNDS = 0.9
"""The least share of processors with a tile, over all rounds."""
ALIGNED = 8  # elements of 16 bits: what the engine that loads tiles can address


def weight_gradient_reference(dy_TO: Tensor, x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """(dW, the sum of its squares)."""
    gradient_OI = dy_TO.t() @ x_TI
    return gradient_OI, gradient_OI.float().square().sum()


def tiles_of(outputs: int, inputs: int) -> int:
    return -(-outputs // TILE_O) * -(-inputs // TILE_I)


def makes_full_rounds(outputs: int, inputs: int, device: torch.device) -> bool:
    """Whether our own product suits a weight: on Hopper, of whole tiles (beside the others squares would be summed up
    that nobody stores), with some for nearly all processors in every round."""
    if capability(device) // 10 != HOPPER // 10 or outputs % TILE_O or inputs % TILE_I:
        return False
    tiles, at_once = tiles_of(outputs, inputs), processors(device)
    return tiles >= FULL_ROUNDS * -(-tiles // at_once) * at_once


def product_programs(outputs: int, inputs: int, device: torch.device) -> int:
    """A whole number of units, of which those behind the last tile write zeros."""
    most = max(UNIT, processors(device) // UNIT * UNIT)
    return min(most, whole_units(tiles_of(outputs, inputs)))


def squared_product(dy_TO: Tensor, x_TI: Tensor, out_OI: Tensor, squares: Tensor) -> Tensor:
    """dyᵀ x into `out_OI`, by as many programs as there is room for their squares."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from automodel.kernels.weight_gradient_triton import weight_gradient_kernel

    tokens, (outputs, inputs) = dy_TO.shape[0], out_OI.shape
    weight_gradient_kernel[(len(squares),)](
        TensorDescriptor.from_tensor(dy_TO, [STEP, TILE_O]), TensorDescriptor.from_tensor(x_TI, [STEP, TILE_I]),
        TensorDescriptor.from_tensor(out_OI, [TILE_O, TILE_I // 2]), squares,
        -(-tokens // STEP), -(-outputs // TILE_O), -(-inputs // TILE_I),
        TILE_O=TILE_O, TILE_I=TILE_I, STEP=STEP, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out_OI


def _squares_of(weights: Sequence[Tensor]) -> SquareSums | None:
    """Where the optimizer takes squares of these weights' gradients, if it takes any."""
    found = {id(s): s for s in (w.__dict__.get("gradient_squares") for w in weights)}
    return next(iter(found.values())) if len(found) == 1 else None


def _has_rows(x: Tensor) -> bool:
    """Whether the engine that loads tiles can read it."""
    apart = x.stride(0) >= x.shape[1] and x.stride(0) % ALIGNED == 0
    return x.stride(1) == 1 and apart and x.data_ptr() % (2 * ALIGNED) == 0


def weight_gradient(dy_TO: Tensor, x_TI: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """dyᵀ x, (O, I), for one weight or for several that lie side by side: at the place that the optimizer has for it,
    if it has one, and with its squares where they are wanted there."""
    place_OI, squares = fixed_place(weights), _squares_of(weights)
    if place_OI is None or squares is None or not runs_triton(dy_TO) or dy_TO.shape[0] > MOST_TOKENS:
        return torch.mm(dy_TO.t(), x_TI, out=place_OI)
    if any(w.grad is not None for w in weights) or place_OI.numel() % BLOCK or place_OI.element_size() != 2:
        return torch.mm(dy_TO.t(), x_TI, out=place_OI)
    outputs, inputs, device = *place_OI.shape, place_OI.device
    if makes_full_rounds(outputs, inputs, device) and _has_rows(dy_TO) and _has_rows(x_TI):
        piece = squares.take_for(weights, product_programs(outputs, inputs, device))
        return squared_product(dy_TO, x_TI, place_OI, piece)
    torch.mm(dy_TO.t(), x_TI, out=place_OI)
    sum_run(place_OI.view(-1), squares.take_for(weights, run_programs(device)))
    return place_OI
