"""Which matrix products of a model are made in FP8, and the switch.

Only products inside the blocks are candidates: the head's logits decide on the loss, and embeddings and norms are no
products. A fused decoder makes four a layer (query, key and value in one; the attention's output; gate and up in one;
down), stock blocks one for each linear layer. Each has to be wide enough to pay (`kernels/fp8_linear.py`), and names
that the config lists (`filter_fqns`) stay as they are: a product that several layers share stays if one of them is
listed.

Fused blocks are told which of their layers take part; stock layers get another `forward`, on the instance, that
`fuse.stock_blocks` takes away again. Under adapters the weights are frozen: they are rounded once, and the bf16 ones
are let go when the first batch has shown that nothing is lost (`let_go_of_bf16`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from automodel.kernels.fp8_linear import fp8_joined_linear, fp8_pays
from automodel.kernels.frozen import Fp8Held, Frozen
from automodel.models.adapted_product import frozen_base, is_frozen
from automodel.models.decoder_parts import DECODERS, decoder_parts
from automodel.models.fused_decoder import FusedDecoderBlock


@dataclass(frozen=True)
class Product:
    """One matrix product of a block."""

    names: tuple[str, ...]
    """The linear layers it computes."""
    inputs: int
    outputs: int
    """Of all layers together."""

    def __str__(self) -> str:
        return f"{self.inputs}→{self.outputs}"

    @property
    def pays(self) -> bool:
        return fp8_pays(self.inputs, self.outputs)

    def listed(self, filters: Sequence[str]) -> bool:
        """Whether a part of one of its names is in the list, as torchao's filter has it."""
        return any(part in name for part in filters for name in self.names)


@dataclass
class Fp8Linear:
    """Takes the place of a stock linear layer's `forward`."""

    linear: nn.Linear

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        flat_TI = x.reshape(-1, x.shape[-1])
        y_TO, _ = fp8_joined_linear(flat_TI, weight.detach(), [weight], [] if bias is None else [bias])
        return y_TO.view(*x.shape[:-1], -1)


def products(model: Any, fused: bool) -> list[Product]:
    """All products inside the blocks of a model, which may be one without weights."""
    return [product for _, product in _products(model, fused)]


def _products(model: Any, fused: bool) -> Iterator[tuple[tuple[nn.Linear, ...], Product]]:
    names = {id(module): name for name, module in model.named_modules()}
    if fused and model.config.model_type in DECODERS:
        for layer in model.model.layers:
            parts = decoder_parts(layer, model.config)
            for linears in (parts.qkv, (parts.out,), parts.gate_up, (parts.down,)):
                outputs = sum(m.out_features for m in linears)
                yield linears, Product(tuple(names[id(m)] for m in linears), linears[0].in_features, outputs)
    elif not fused:
        for name, module in model.named_modules():
            inside = any(part.isdigit() for part in name.split("."))  # of a list of layers
            if isinstance(module, nn.Linear) and inside:
                yield (module,), Product((name,), module.in_features, module.out_features)


def use_fp8(model: Any, filters: Sequence[str] = ()) -> list[Product]:
    """Switches the products that pay to FP8, after the blocks were fused; returns them."""
    blocks = _fused_blocks(model)
    chosen = [(m, p) for m, p in _products(model, bool(blocks)) if p.pays and not p.listed(filters)]
    if blocks and chosen and is_frozen(chosen[0][0][0]):
        before = blocks[0].held
        held: dict[int, Frozen] = {
            id(linears[0]): Fp8Held(frozen_base(linears, before.get(id(linears[0])), torch.bfloat16).weight())
            for linears, _ in chosen
        }
        for block in blocks:
            block.fp8_held = held
    elif blocks:
        layers = frozenset(id(linear) for linears, _ in chosen for linear in linears)
        for block in blocks:
            block.fp8 = layers
    else:
        for (linear,), _ in chosen:
            linear.forward = Fp8Linear(linear)  # ty: ignore[invalid-assignment]
    return [product for _, product in chosen]


def _fused_blocks(model: Any) -> list[FusedDecoderBlock]:
    return [m.forward for m in model.modules() if isinstance(m.__dict__.get("forward"), FusedDecoderBlock)]


@contextmanager
def without_fp8(model: Any) -> Generator[None]:
    """Frozen products of fused blocks in bf16 inside the block."""
    held = [(block, block.fp8_held) for block in _fused_blocks(model)]
    bf16_again(model)
    try:
        yield
    finally:
        for block, own in held:
            block.fp8_held = own


def bf16_again(model: Any) -> None:
    """Frozen products of fused blocks in bf16 from now on."""
    for block in _fused_blocks(model):
        block.fp8_held = {}


def let_go_of_bf16(model: Any) -> None:
    """Frozen layers of fused blocks keep their 8-bit rows, which are there anyway, instead of bf16 weights. Layers with
    adapters still compute with them, in stock blocks too; plain ones refuse there, by their dtype."""
    for block in _fused_blocks(model):
        for linears in (block.parts.qkv, (block.parts.out,), block.parts.gate_up, (block.parts.down,)):
            held, first = block.fp8_held.get(id(linears[0])), 0
            if isinstance(held, Fp8Held):
                block.held.pop(id(linears[0]), None)
                for linear in linears:
                    linear.weight.data = held.rows_OI[first : first + linear.out_features]
                    linear.weight_scale = held.scale
                    first += linear.out_features
