"""AdamW's moments in 8 bits: a code for each number and one fp32 scale for each strip of 256.

    value = scale · book[code]             scale = largest magnitude of the strip

The book is the dynamic map of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022): seven decades
from 1e-6 to 1, each cut into equal intervals, twice as many as the decade below; a code stands for the middle of its
interval. So magnitudes around the largest have three digits, and those a million times smaller still have one. The
first moment has a sign (2ⁱ intervals in decade i, on both sides of 0), the second none (2ⁱ⁺¹):

    signed     code = 127 ± j,  j = 2ⁱ + k            0: 127     1: 255
    unsigned   code = j,        j + 1 = 2ⁱ⁺¹ + k      0: 0       1: 255              k: interval of the decade
    book       10ⁱ⁻⁶ · (0.1 + 0.9 (k + ½) / intervals)

Both directions are arithmetic, no search through 256 entries: the decade by six comparisons, the interval by a
product. Rounding is to the nearest entry, also between decades. Codes are positions in the sorted book, as they are in
bitsandbytes.

One departure: a second moment that is not zero never becomes the code of 0, or a first moment that is still there would
be divided by ε. It keeps the smallest entry, which makes such steps smaller.

What stays in 32 bits is the caller's to say (`FlatAdamW(eight_bit=…)`); it has moments of its own here, in fp32
whatever the weights are. Two launches update a model, one for each sort. 8-bit moments read and write 4 bytes a
parameter where fp32 ones take 16; with bf16 weights and gradients a step moves 12 bytes a parameter with its norm.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from automodel.kernels.flat_parameters import BLOCK, FlatParameters, Place

if TYPE_CHECKING:
    from automodel.kernels.adamw import AdamWState

STRIP = 256
"""Numbers that share a scale."""
DECADES = 7
SIGNED_ZERO = 127
SIGNED_ONE, UNSIGNED_ONE = 128, 255
"""Distance of the code of 1 from that of 0."""
SMALLEST = 4096
"""Elements of a parameter that is worth 8 bits; smaller ones are biases and norms."""
WARPS = 8

EIGHT_BIT_KEYS = ("exp_avg_code", "exp_avg_scale", "exp_avg_sq_code", "exp_avg_sq_scale")
"""What there is of a parameter with 8-bit moments, in a checkpoint."""
WIDE_KEYS = ("exp_avg", "exp_avg_sq")


def intervals(decade: int, signed: bool) -> int:
    return 2**decade if signed else 2 ** (decade + 1)


def middle(decade: int, k: int, signed: bool) -> float:
    """The entry of the book for interval k of a decade."""
    return 10.0 ** (decade - DECADES + 1) * (0.1 + 0.9 * (k + 0.5) / intervals(decade, signed))


def lower_bounds(signed: bool) -> list[float]:
    """From where on a magnitude belongs to each decade, and to 1: half-way between neighbours of the book."""
    first = [middle(decade, 0, signed) for decade in range(DECADES)] + [1.0]
    last = [0.0] + [middle(decade, intervals(decade, signed) - 1, signed) for decade in range(DECADES)]
    return [(a + b) / 2 for a, b in zip(first, last)]


def book(signed: bool) -> Tensor:
    """All 256 entries, sorted, fp32."""
    positive = [middle(d, k, signed) for d in range(DECADES) for k in range(intervals(d, signed))]
    negative = [-value for value in reversed(positive)] if signed else []
    return torch.tensor([*negative, 0.0, *positive, 1.0], dtype=torch.float64).float()


def quantise_reference(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes in the shape of `values`, scales of its strips)."""
    flat = values.detach().float().flatten()
    strips = torch.nn.functional.pad(flat, (0, -flat.numel() % STRIP)).view(-1, STRIP)
    scale = strips.abs().amax(dim=1)
    share = strips / torch.where(scale > 0, scale, 1.0)[:, None]
    entries = book(signed).to(flat.device)
    between = (entries[1:].double() + entries[:-1].double()) / 2
    codes = torch.searchsorted(between.float(), share, right=True)
    if not signed:
        codes = codes.clamp(min=(strips > 0).to(codes.dtype))
    return codes.to(torch.uint8).flatten()[: flat.numel()].view(values.shape), scale


def dequantise_reference(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    each = scale.repeat_interleave(STRIP)[: codes.numel()].view(codes.shape)
    return book(signed).to(codes.device)[codes.long()] * each


class EightBitMoments:
    """Both moments of all parameters: codes and scales of the narrow ones, fp32 of the others."""

    def __init__(self, flat: FlatParameters, narrow: Collection[torch.nn.Parameter]):
        chosen = {id(parameter) for parameter in narrow}
        self.narrow = {id(p.parameter): p for p in flat.places if id(p.parameter) in chosen}
        wide = [p for p in flat.places if id(p.parameter) not in chosen]
        self.starts: dict[int, int] = {}
        """Where the moments of each parameter begin, in the buffers of its sort."""
        self.narrow_blocks = self._lay_out(list(self.narrow.values()), flat.device)
        self.wide_blocks = self._lay_out(wide, flat.device)
        codes, strips = len(self.narrow_blocks) * BLOCK, len(self.narrow_blocks) * (BLOCK // STRIP)
        self.codes = (
            torch.full((codes,), SIGNED_ZERO, dtype=torch.uint8, device=flat.device),
            torch.zeros(codes, dtype=torch.uint8, device=flat.device),
        )
        self.scales = tuple(torch.zeros(strips, device=flat.device) for _ in range(2))
        self.wide = tuple(torch.zeros(len(self.wide_blocks) * BLOCK, device=flat.device) for _ in range(2))

    def _lay_out(self, places: Sequence[Place], device: torch.device) -> Tensor:
        """The blocks of these parameters in the flat buffer, in the order in which their moments stand here."""
        ranges, count = [torch.empty(0, dtype=torch.int32)], 0
        for place in places:
            self.starts[id(place.parameter)] = count * BLOCK
            first, count = place.start // BLOCK, count + place.blocks
            ranges.append(torch.arange(first, first + place.blocks, dtype=torch.int32))
        return torch.cat(ranges).to(device)

    def tensors(self, place: Place) -> dict[str, Tensor]:
        """What is kept of one parameter: views, by the names of `EIGHT_BIT_KEYS` or `WIDE_KEYS`."""
        parameter, start = place.parameter, self.starts[id(place.parameter)]
        end, strips = start + parameter.numel(), -(-parameter.numel() // STRIP)
        if id(parameter) not in self.narrow:
            return {key: buffer[start:end].view(parameter.shape) for key, buffer in zip(WIDE_KEYS, self.wide)}
        kept: dict[str, Tensor] = {}
        for key, codes, scales in zip(WIDE_KEYS, self.codes, self.scales):
            kept[f"{key}_code"] = codes[start:end].view(parameter.shape)
            kept[f"{key}_scale"] = scales[start // STRIP : start // STRIP + strips]
        return kept

    def read(self, place: Place) -> tuple[Tensor, Tensor]:
        """Both moments in fp32; a parameter in 32 bits gives its own."""
        kept = self.tensors(place)
        if id(place.parameter) not in self.narrow:
            return kept["exp_avg"], kept["exp_avg_sq"]
        first, second = (
            dequantise_reference(kept[f"{key}_code"], kept[f"{key}_scale"], signed)
            for key, signed in zip(WIDE_KEYS, (True, False))
        )
        return first, second

    def write(self, place: Place, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        kept = self.tensors(place)
        for key, values, signed in zip(WIDE_KEYS, (exp_avg, exp_avg_sq), (True, False)):
            if id(place.parameter) not in self.narrow:
                kept[key].copy_(values)
                continue
            codes, scales = quantise_reference(values, signed)
            kept[f"{key}_code"].copy_(codes)
            kept[f"{key}_scale"].copy_(scales)


def launch_update(
    flat: FlatParameters, state: AdamWState, addresses: Tensor, zero_gradients: bool, kinds: dict[str, Any]
) -> None:
    """The update of all parameters with the settings of this step. `kinds`: what sorts of gradients there are."""
    from automodel.kernels.adamw8_triton import update8_kernel

    eight = state.eight
    assert eight is not None
    sorts = (
        (eight.narrow_blocks, eight.codes, eight.scales, True),
        (eight.wide_blocks, eight.wide, (None, None), False),
    )
    for blocks, moments, scales, narrow in sorts:
        if len(blocks):
            update8_kernel[(len(blocks),)](
                flat.weight, *moments, *scales, flat.copy, addresses, flat.blocks, blocks, state.settings,
                flat.n_blocks, EIGHT=narrow, STRIP=STRIP, ZERO=zero_gradients, num_warps=WARPS, **kinds,
            )  # fmt: skip
