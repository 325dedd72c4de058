"""Weights in 4 or 8 bits, and back: the number formats of bitsandbytes.

    4 bits    w ≈ book[code] · scale                one scale for 64 numbers, row after row, whatever the rows' length
    8 bits    w ≈ code / 127 · scale                one scale for each row

`nf4` is the book of Dettmers et al., "QLoRA" (2023): the sixteen quantiles of a normal distribution, so that each code
is used about as often; `fp4` has a sign, two bits of exponent and one of mantissa. Two codes share a byte, the first in
its upper half. With double quantisation the scales are in 8 bits too: their mean is kept, and what is left of each as a
code of the signed dynamic map, with one scale for 256 (`adamw8.py` has the same map for moments). That is 4.127 bits a
weight instead of 4.5.

A GPU has no products of such numbers that pay for training: weights are expanded, then multiplied (`frozen.py`).
Expanding is one pass that reads half a byte and writes two for each weight; a product of thousands of tokens takes a
hundred times as long.

Codes and scales expand to what bitsandbytes makes of them (`tests/parity/test_bitsandbytes.py`); packing decides ties
otherwise in fewer than one of a thousand 4-bit codes. It need not be installed.

Shapes: O rows, I columns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from automodel.kernels.adamw8 import STRIP, book, quantise_reference
from automodel.kernels.dispatch import runs_triton

GROUP = 64
"""Weights that share a scale, in 4 bits."""
GROUPS, COLUMNS, WARPS = 32, 1024, 4
"""Of one program: groups of 4-bit weights, or columns of a row of 8-bit ones."""
AT_ONCE = 1 << 24
"""Weights that are quantised at a time: what that takes beside them is small."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3))
BOOKS = {"nf4": NF4, "fp4": FP4}
KINDS = (*BOOKS, "int8")


@dataclass(frozen=True)
class Packed:
    """A matrix (O, I) in few bits."""

    kind: str
    shape: tuple[int, int]
    codes: Tensor
    """4 bits: uint8, two to a byte. 8 bits: int8 (O, I)."""
    scales: Tensor
    """fp32; or, doubly quantised, their codes in uint8."""
    wide_scales: Tensor | None = None
    """fp32, one for 256 scales."""
    mean: Tensor | None = None
    """() fp32: what was subtracted from the scales."""

    @property
    def outputs(self) -> int:
        return self.shape[0]

    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def to(self, device: Any) -> Packed:
        return replace(self, **{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def expand(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The weights again, (O, I), into `out` where that is given."""
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device) if out is None else out
        if not runs_triton(self.codes):
            return out.copy_(expand_reference(self))
        if self.kind == "int8":
            _launch_rows(self, out)
        else:
            _launch(self, out)
        return out


def pack(weight_OI: Tensor, kind: str = "nf4", double: bool = True) -> Packed:
    """The matrix in few bits. double: scales of 4-bit weights are quantised as well."""
    shape = (weight_OI.shape[0], weight_OI.shape[1])
    if kind == "int8":
        scales_O = weight_OI.abs().amax(dim=1).float()
        parts = weight_OI.split(max(1, AT_ONCE // shape[1]))
        factors = (127.0 / scales_O.clamp(min=torch.finfo(torch.float32).tiny)).split(max(1, AT_ONCE // shape[1]))
        codes = torch.cat([(w.float() * f[:, None]).round_().to(torch.int8) for w, f in zip(parts, factors)])
        return Packed(kind, shape, codes, scales_O)
    parts = [_pack_part(part, kind) for part in weight_OI.detach().flatten().split(AT_ONCE)]
    codes, scales = (torch.cat(tensors) for tensors in zip(*parts))
    if not double:
        return Packed(kind, shape, codes, scales)
    mean = scales.mean()
    narrow, wide = quantise_reference(scales - mean, signed=True)
    return Packed(kind, shape, codes, narrow, wide, mean)


def _pack_part(flat: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(codes, two to a byte; scales)."""
    groups = torch.nn.functional.pad(flat.float(), (0, -flat.numel() % GROUP)).view(-1, GROUP)
    scales = groups.abs().amax(dim=1)
    share = (groups / torch.where(scales > 0, scales, 1.0)[:, None]).flatten()[: flat.numel()]
    entries, order = torch.tensor(BOOKS[kind], dtype=torch.float64).sort(stable=True)
    between = ((entries[1:] + entries[:-1]) / 2).float().to(flat.device)
    codes = order.to(torch.uint8).to(flat.device)[torch.bucketize(share, between, out_int32=True)]
    codes = torch.nn.functional.pad(codes, (0, flat.numel() % 2))
    return (codes[::2] << 4) | codes[1::2], scales


def group_scales(packed: Packed) -> Tensor:
    """The scales in fp32."""
    if packed.wide_scales is None or packed.mean is None:
        return packed.scales
    each = packed.wide_scales.repeat_interleave(STRIP)[: packed.scales.numel()]
    return book(True).to(each.device)[packed.scales.long()] * each + packed.mean


def expand_reference(packed: Packed) -> Tensor:
    """The definition, in fp32."""
    scales = group_scales(packed)
    if packed.kind == "int8":
        return packed.codes.float() * (scales / 127.0)[:, None]
    rows, columns = packed.shape
    codes = torch.stack([packed.codes >> 4, packed.codes & 15], dim=1).flatten()[: rows * columns]
    values = torch.tensor(BOOKS[packed.kind], dtype=torch.float32, device=codes.device)[codes.int()]
    each = scales.repeat_interleave(GROUP)[: values.numel()]
    return (values * each).view(rows, columns)


_tables: dict[tuple[str, torch.device], Tensor] = {}


def _table(name: str, device: torch.device) -> Tensor:
    """A book on the device, made once: recorded steps read it where it is."""
    key = (name, device)
    if key not in _tables:
        entries = book(True) if name == "dynamic" else torch.tensor(BOOKS[name], dtype=torch.float32)
        _tables[key] = entries.to(device)
    return _tables[key]


def _launch(packed: Packed, out: Tensor) -> None:
    from automodel.kernels.packed_triton import expand_kernel

    double = packed.wide_scales is not None
    dynamic = _table("dynamic", out.device) if double else None
    expand_kernel[(-(-out.numel() // (GROUPS * GROUP)),)](
        packed.codes, packed.scales, packed.wide_scales, packed.mean, _table(packed.kind, out.device), dynamic, out,
        out.numel(), DOUBLE=double, EVEN=out.numel() % (GROUPS * GROUP) == 0, HALF=GROUP // 2, STRIP=STRIP,
        GROUPS=GROUPS, num_warps=WARPS,
    )  # fmt: skip


def _launch_rows(packed: Packed, out: Tensor) -> None:
    from automodel.kernels.packed_triton import expand_rows_kernel

    rows, columns = packed.shape
    expand_rows_kernel[(rows, -(-columns // COLUMNS))](
        packed.codes, packed.scales, out, WIDTH=columns, BLOCK=COLUMNS, num_warps=WARPS
    )
