"""Numbers of 8 bits for matrix products: one scale for a whole tensor, found just in time.

    scale = max|x| / LARGEST          q = round(x / scale)          x ≈ scale · q
    a bᵀ  ≈ scale_a · scale_b · (q_a q_bᵀ)                          fp32 in the accumulators, bf16 in the result

e4m3 (three bits of mantissa, up to 448) holds activations and weights, e5m2 (two, up to 57,344) gradients, whose small
numbers matter and whose rounding the sum over tokens averages out.

Tensor cores take FP8 operands only with the summed dimension last in memory. A backward pass sums over other dimensions
than the forward pass, so it needs transposed copies. `quantise` makes both in one pass: a tile is read once, and is
written as it lies and transposed. Transposed copies are padded with zeros to whole 16 rows, as the products ask for.

Costs of an activation in bytes an element: 2 to find the largest, 2 + 1 + 1 to make the two copies. Whoever wrote the
tensor wrote its end last; the first pass begins there and walks to the beginning, where the second begins: what is
still in the cache is not read again. Where the scale is known already (a weight again in the backward pass, an
activation that was computed again), the first pass is left out.

`benchmarks/kernels_fp8.py` says what that leaves of a product that takes half the time. Without a GPU, products are
made of the same rounded numbers in fp32.

Shapes: T rows, I columns, P = T rounded up to 16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from automodel.kernels.dispatch import power_of_two_above, processors, runs_triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
MULTIPLE = 16
"""What sizes of FP8 products must be multiples of."""
TINIEST = 1e-30
"""Stands in for the largest magnitude of a tensor of zeros."""
PROGRAMS_PER_PROCESSOR, AMAX_BLOCK, AMAX_WARPS = 4, 8192, 8
TILE_ROWS, TILE_COLUMNS, TILE_WARPS = 128, 64, 8


class Quantised(NamedTuple):
    """A matrix in 8 bits; what was not asked for is None."""

    scale: Tensor
    """(1,) fp32: what to multiply by to get the numbers back."""
    rows_TI: Tensor | None
    columns_IP: Tensor | None
    """The same transposed, with zeros behind the last row."""


def _padded(rows: int) -> int:
    return -(-rows // MULTIPLE) * MULTIPLE


def quantise_reference(
    x_TI: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool = True, scale: Tensor | None = None
) -> Quantised:
    """The definition, in fp32."""
    if scale is None:
        scale = (x_TI.abs().amax().float().clamp(min=TINIEST) / LARGEST[dtype]).reshape(1)
    q_TI = (x_TI.float() * (1.0 / scale)).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    if not columns:
        return Quantised(scale, q_TI, None)
    columns_IP = torch.zeros((x_TI.shape[1], _padded(x_TI.shape[0])), dtype=dtype, device=x_TI.device)
    columns_IP[:, : x_TI.shape[0]] = q_TI.t()
    return Quantised(scale, q_TI if rows else None, columns_IP)


def round_trip_reference(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What is left of x, in fp32."""
    q = quantise_reference(x, dtype, columns=False)
    assert q.rows_TI is not None
    return q.rows_TI.float() * q.scale


def quantise(
    x_TI: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool = True, scale: Tensor | None = None
) -> Quantised:
    """x in 8 bits, as it lies and transposed. scale: that of an earlier `quantise` of the same numbers."""
    if not runs_triton(x_TI):
        return quantise_reference(x_TI, dtype, rows=rows, columns=columns, scale=scale)
    from automodel.kernels.fp8_triton import quantise_kernel

    x_TI = x_TI.contiguous()
    T, width = x_TI.shape
    partial = None
    if scale is None:
        partial, scale = _partial_maxima(x_TI), torch.empty(1, device=x_TI.device)
    rows_TI = torch.empty((T, width), dtype=dtype, device=x_TI.device) if rows else None
    columns_IP = torch.empty((width, _padded(T)), dtype=dtype, device=x_TI.device) if columns else None
    # Tiles reach to the padded end of the columns, where zeros are to be written.
    grid = -(-_padded(T) // TILE_ROWS) * -(-width // TILE_COLUMNS)
    quantise_kernel[(grid,)](
        x_TI, partial, scale, rows_TI, columns_IP, T, width, _padded(T), 0 if partial is None else len(partial),
        LARGEST=LARGEST[dtype], TINIEST=TINIEST, BLOCK_R=TILE_ROWS, BLOCK_C=TILE_COLUMNS,
        PARTIALS=1 if partial is None else power_of_two_above(len(partial)), num_warps=TILE_WARPS,
    )  # fmt: skip
    return Quantised(scale, rows_TI, columns_IP)


def _partial_maxima(x: Tensor) -> Tensor:
    """The largest magnitudes of parts of x, for whoever reads all of them."""
    from automodel.kernels.fp8_triton import amax_kernel

    programs = min(PROGRAMS_PER_PROCESSOR * processors(x.device), -(-x.numel() // AMAX_BLOCK))
    partial = torch.empty(programs, device=x.device)
    amax_kernel[(programs,)](x, partial, x.numel(), BLOCK=AMAX_BLOCK, num_warps=AMAX_WARPS)
    return partial


def product(
    a_MK: Tensor,
    b_NK: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """a bᵀ + bias of 8-bit matrices, in `dtype`. fast: the tensor cores' own accumulators all the way (about 14 bits)
    instead of adding to fp32 registers after every few steps."""
    if a_MK.is_cuda:
        return torch._scaled_mm(
            a_MK, b_NK.t(), scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast, out=out
        )
    result = (a_MK.float() @ b_NK.float().t()) * (scale_a * scale_b)
    result = (result if bias is None else result + bias.float()).to(dtype)
    return result if out is None else out.copy_(result)
