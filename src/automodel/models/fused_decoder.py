"""Decoder blocks in about ten kernels forward: Llama, Mistral, Qwen2, Qwen3, SmolLM3, Gemma, Gemma 3, Phi-3, OLMo2.

    y, h    = RMSNorm(h + x), h + x                        x: what the block before left to be added
    q, k, v = rope(y [Wq; Wk; Wv]ᵀ + b)                    one product, rotated as it is taken apart (`rope_heads.py`)
    x       = attention(q, k, v) Woᵀ                       causal, document by document; windows where the layer has one
    y, h    = RMSNorm(h + x), h + x
    x       = (act(g) · u) Wdᵀ,   g, u = y [Wg; Wu]ᵀ       (`swiglu.py`)

A block hands on x and h unadded (`Stream`), so that every addition is part of the norm that follows, in the next block
or at the end. Gemma 3 also normalises x before it is added, OLMo2 only there and not in front of the products; that is
`Norms`. transformers' own forward passes a block's result to the next one without looking at it.

After the last block only some rows are read: the pooled token of each document of a classifier, or the tokens that
carry labels. Then that block, the final norm and the head are computed for those rows alone, with keys and values of
every token. For a pooled token that holds for the queries too (`fused_decoder_attention.py`). Both are exact.

The swap is made on the instances, from a table. Parameters keep their names; weights that one product reads are
neighbours in the flat buffer. Angles come from the model's own rotary module, in fp32, where stock code rounds them.

Legend: T tokens, R rows that are read, N width, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel.data.batch import PackedBatch
from automodel.kernels.attention import ATTENTION_SITES, Attention, Turned, attention, can_turn
from automodel.kernels.embedding import word_embedding
from automodel.kernels.fp8_linear import fp8_joined_linear, fp8_swiglu_linear
from automodel.kernels.frozen import Frozen
from automodel.kernels.lazy_rows import lazy_rows_of
from automodel.kernels.linear import apart_linear, joined_linear
from automodel.kernels.made_again import made_again
from automodel.kernels.recompute import computing_again
from automodel.kernels.rope import rope_, rope_table
from automodel.kernels.rope_heads import HeadNorms, Heads, rope_heads, rope_joined
from automodel.kernels.side_by_side import joined_view
from automodel.kernels.side_stream import SideStream
from automodel.kernels.swiglu import swiglu, swiglu_linear
from automodel.kernels.take_rows import take_rows
from automodel.models.adapted_product import (
    adapted_mlp,
    adapted_product,
    can_fuse_adapter,
    is_frozen,
    join_frozen,
    lie_together,
    put_below,
    put_beside,
)
from automodel.models.block_stream import Stream, UnusedAngles
from automodel.models.decoder_parts import DECODERS, Norm, Parts, decoder_parts, fusable_decoder_config
from automodel.models.fused_decoder_attention import Documents, attend, attend_last, cut_behind, stays_joined


def fusable_decoder(model: Any) -> bool:
    """Whether `fuse_decoder` will swap this model's layers once its parameters are flat: all of them are trained, or
    adapters beside them are."""
    if not fusable_decoder_config(model.config):
        return False
    return all(p.requires_grad for p in model.model.parameters()) or can_fuse_adapter(model)


def _weights(linears: tuple[nn.Linear, ...]) -> list[nn.Parameter]:
    return [m.weight for m in linears]  # ty: ignore[invalid-return-type]


class Angles:
    """Cosines and sines of one kind of layer, made when they are needed. Captured graphs keep reading the table they
    were recorded with, so a longer one does not replace it."""

    def __init__(self, rotary: Any, layer_type: str | None):
        own = f"{layer_type}_" if hasattr(rotary, f"{layer_type}_inv_freq") else ""
        self.inverse_frequencies: Tensor = getattr(rotary, f"{own}inv_freq")
        self.scaling: float = getattr(rotary, f"{own}attention_scaling")
        self.tables: list[Tensor] = []

    def up_to(self, positions: int) -> Tensor:
        for table in self.tables:
            if table.shape[1] >= positions:
                return table
        self.tables.append(rope_table(self.inverse_frequencies, positions, self.scaling))
        return self.tables[-1]


class FusedDecoderTokens:
    """Takes the place of the embedding's `forward`, and knows which batch is being read."""

    def __init__(self, module: Any):
        self.module = module
        self.batch: PackedBatch | None = None

    def bind(self, batch: PackedBatch) -> None:
        self.batch = batch

    def __call__(self, input_ids: Tensor) -> Tensor:
        module, batch = self.module, self.batch
        assert batch is not None, "bind the packed batch before the model runs"
        lazy = lazy_rows_of(module.weight)
        rows = word_embedding(batch.input_ids_T, module.weight, batch.token_runs_2T, module.padding_idx, lazy)
        scale = getattr(module, "embed_scale", None)  # Gemma
        return (rows if scale is None else rows * scale.to(rows.dtype)).unsqueeze(0)


@dataclass
class FusedDecoderBlock:
    """Takes the place of one layer's `forward`. Returns a `Stream` of all tokens, or, in the last block, of the rows
    that the caller names."""

    layer: Any
    parts: Parts
    angles: Angles | None
    seed: Tensor
    """The device tensor that every dropout of the step reads."""
    site: int
    pools: bool
    """Whether this is the last block, which may run for some rows alone."""
    side: SideStream | None
    fp8: frozenset[int] = frozenset()
    """Linear layers, by identity, whose products are made in FP8 (`fp8.py`)."""
    held: dict[int, Frozen] = field(default_factory=dict)
    """Frozen matrices that are held in another form than their weights, by the identity of the first layer."""
    fp8_held: dict[int, Frozen] = field(default_factory=dict)
    """Those among them, and others, that are used in FP8 instead."""
    apart: bool = False
    """Whether weights of one product may lie anywhere, as those of a sharded model do; frozen ones are then left to
    their own layers."""
    norms_again: bool = False
    """Whether products keep the stream instead of what a norm made of it."""
    gates_kept: bool = False
    """Whether the MLP's last product keeps what it reads instead of making it again."""

    def __call__(
        self,
        hidden_states: Tensor | Stream,
        *args: Any,
        position_ids: Tensor,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        pooled_positions: Tensor | None = None,
        read_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Stream:
        documents = Documents(cu_seq_lens_q, max_length_q, position_ids[0])
        norms = self.parts.norms
        if isinstance(hidden_states, Stream):
            y, h = self._add(hidden_states.branch_TN, hidden_states.residual_TN, norms.before_attention)
        else:
            y, h = self._add(hidden_states.squeeze(0), None, norms.before_attention)
        if self.pools and pooled_positions is not None and not self.parts.softcap:
            attended, h = self._attend_pooled(y, h, documents, pooled_positions)
        else:
            attended, h = self._attend(y, h, documents)
            rows = read_positions if pooled_positions is None else pooled_positions
            if self.pools and rows is not None:
                attended, h = (take_rows(t, rows) for t in (attended, h))
        x = self._branch(self._linear(attended, self.parts.out), norms.after_attention)
        return self._mlp(*self._add(x, h, norms.before_mlp))

    def _add(self, x: Tensor, h: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """(what the next product reads, the stream), both the plain sum where there is no norm."""
        if norm is not None:
            return norm(x, h, self.side)
        total = x if h is None else h + x
        return total, total

    def _normed(self, y: Tensor, h: Tensor, norm: Norm | None) -> AbstractContextManager[None]:
        """Around the product that reads y: the stream is kept for it, which is kept anyway, and normed again. A layer
        that is computed again has nothing to keep; in torch's own checkpoints this would keep the stream."""
        if norm is None or not self.norms_again or not torch.is_grad_enabled():
            return nullcontext()
        if computing_again() or getattr(self.layer, "gradient_checkpointing", False):
            return nullcontext()
        return made_again(y, norm.again(h))

    def _branch(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else norm(x, None, self.side)[0]

    def _linear(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return self._product(x, (linear,))[0]

    def _forms(self) -> dict[int, Frozen]:
        return self.held | self.fp8_held

    def _product(self, x: Tensor, linears: tuple[nn.Linear, ...]) -> tuple[Tensor, Tensor]:
        """(all layers' outputs side by side, x to go on with)."""
        if self.apart and is_frozen(linears[0]):
            return torch.cat([linear(x) for linear in linears], dim=1) if len(linears) > 1 else linears[0](x), x
        if is_frozen(linears[0]):
            return adapted_product(x, linears, self._forms().get(id(linears[0])), self.side)
        weights = _weights(linears)
        joined = joined_view(weights)
        if joined is None and self.apart:
            return apart_linear(x, weights, [m.bias for m in linears if m.bias is not None])
        assert joined is not None, "the weights of one product were moved apart after the model was fused"
        biases = [m.bias for m in linears if m.bias is not None]
        make = fp8_joined_linear if id(linears[0]) in self.fp8 else joined_linear
        return make(x, joined, weights, biases, self.side)

    def _mlp(self, y: Tensor, h: Tensor) -> Stream:
        p = self.parts
        # Computed again, the last product is left out, unless a norm inside the block reads it.
        read = not computing_again() or p.norms.after_mlp is not None
        if self.apart and is_frozen(p.down):
            inner, around = self._product(y, p.gate_up)
            x = p.down(swiglu(inner, p.activation))
        elif is_frozen(p.down):
            x, around = adapted_mlp(y, p.gate_up, p.down, self._forms(), p.activation, self.side, read)
        else:
            with self._normed(y, h, p.norms.before_mlp):
                inner, around = self._product(y, p.gate_up)
            last = (inner, p.down.weight, p.down.bias, p.activation, self.side, read)
            x = fp8_swiglu_linear(*last) if id(p.down) in self.fp8 else swiglu_linear(*last, self.gates_kept)
        if p.norms.before_mlp is None:
            h = around  # the stream itself was read: both its gradients meet in the product's backward
        return Stream(self._branch(x, p.norms.after_mlp), h)

    def _how(self) -> Attention:
        p = self.parts
        return Attention(
            heads=p.heads.queries,
            key_heads=p.heads.keys,
            head_dim=p.heads.dim,
            scale=p.scaling,
            causal=True,
            window=-1 if p.window is None else p.window - 1,
            dropout=p.attention_dropout if self.layer.training else 0.0,
            site=ATTENTION_SITES + self.site,
            softcap=p.softcap,
        )

    def _attend(self, y: Tensor, h: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
        """(attention output, the stream)."""
        p, how = self.parts, self._how()
        with self._normed(y, h, p.norms.before_attention):
            qkv, around = self._product(y, p.qkv)
        if p.norms.before_attention is None:
            h = around
        if stays_joined(qkv, documents, how):
            table = self._table(documents.longest)
            turned = None if table is None or p.head_norms is not None else Turned(documents.positions_T, table)
            if turned is None or not can_turn(turned.table, how):
                qkv, turned = self._joined_heads(qkv, documents), None
            return attention(qkv, documents.boundaries, documents.longest, how, self.seed, turned), h
        q, k, v = self._heads(qkv, documents.positions_T, documents.longest, p.heads)
        return attend(q, k, v, documents, how), h

    def _attend_pooled(self, y: Tensor, h: Tensor, documents: Documents, pooled_R: Tensor) -> tuple[Tensor, Tensor]:
        """Both for the pooled rows alone, (R, …)."""
        p, heads = self.parts, self.parts.heads
        pieces = cut_behind(pooled_R, documents)
        y_B = y.index_select(0, pieces.queries_B)
        if is_frozen(p.qkv[0]) and (len(p.qkv) == 1 or id(p.qkv[0]) in self._forms()):
            # One matrix holds all three, and cannot be taken apart. One layer can afford the whole product.
            n = heads.queries * heads.dim
            q, kv = self._product(y_B, p.qkv)[0][:, :n], self._product(y, p.qkv)[0][:, n:]
        elif len(p.qkv) == 1:
            # One parameter holds all three: slices of it, whose gradients autograd joins. One layer can afford that.
            n, linear = heads.queries * heads.dim, p.qkv[0]
            bias = (None, None) if linear.bias is None else (linear.bias[:n], linear.bias[n:])
            q, kv = F.linear(y_B, linear.weight[:n], bias[0]), F.linear(y, linear.weight[n:], bias[1])
        else:
            q, kv = self._product(y_B, p.qkv[:1])[0], self._product(y, p.qkv[1:])[0]
        positions_B = documents.positions_T.index_select(0, pieces.queries_B)
        q, _, _ = self._heads(q, positions_B, documents.longest, heads._replace(keys=0))
        _, k, v = self._heads(kv, documents.positions_T, documents.longest, heads._replace(queries=0))
        attended = attend_last(q, k, v, pieces, documents, self._how())
        rows = pooled_R.shape[0]
        return attended[0 : 2 * rows : 2], h.index_select(0, pooled_R)

    def _joined_heads(self, x_TW: Tensor, documents: Documents) -> Tensor:
        """Queries, keys and values of a product, side by side as they are; x is not to be used afterwards."""
        heads, positions_T, table = self.parts.heads, documents.positions_T, self._table(documents.longest)
        if self._norms_are_wide():
            return torch.cat(self._wide_heads(x_TW, positions_T, table, heads), dim=1).flatten(1)
        if table is None:
            return x_TW
        return rope_joined(x_TW, positions_T, table, heads, self._head_norms(), self.side)

    def _heads(self, x_TW: Tensor, positions_T: Tensor, longest: int, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """The same, apart; where x holds only queries, or only keys and values, `heads` says so."""
        table = self._table(longest)
        if self._norms_are_wide():
            return self._wide_heads(x_TW, positions_T, table, heads)
        if table is None:
            return heads.split(x_TW)
        return rope_heads(x_TW, positions_T, table, heads, self._head_norms(), self.side)

    def _table(self, longest: int) -> Tensor | None:
        assert self.angles is not None or self.parts.head_norms is None, "no family norms heads that it does not turn"
        return None if self.angles is None else self.angles.up_to(longest)

    def _norms_are_wide(self) -> bool:
        norms = self.parts.head_norms
        return norms is not None and norms[0].weight.shape[0] > self.parts.heads.dim

    def _head_norms(self) -> HeadNorms | None:
        norms = self.parts.head_norms
        return None if norms is None else HeadNorms(norms[0].weight, norms[1].weight, *norms[0][1:])

    def _wide_heads(self, x_TW: Tensor, positions_T: Tensor, table: Tensor | None, heads: Heads):
        """OLMo2: norms over all query heads and over all key heads together."""
        norms = self.parts.head_norms
        assert norms is not None
        assert table is not None
        made = []
        *turning, v = x_TW.split([n * heads.dim for n in (heads.queries, heads.keys, heads.keys)], dim=1)
        for part, norm, count in zip(turning, norms, heads[:2]):
            if count:
                part = rope_(norm(part, None, self.side)[0], positions_T, table, count, heads.dim)
            made.append(part.unflatten(1, (count, heads.dim)))
        return made[0], made[1], v.unflatten(1, (heads.keys, heads.dim))


@dataclass
class FusedFinalNorm:
    """Takes the place of the final norm's `forward`: adds what the last block left to be added."""

    norm: Norm
    side: SideStream | None

    def __call__(self, hidden_states: Stream) -> Tensor:
        return self.norm(hidden_states.branch_TN, hidden_states.residual_TN, self.side)[0].unsqueeze(0)


def fuse_decoder(
    model: Any,
    seed: Tensor,
    side: SideStream | None,
    longest: int,
    apart: bool = False,
    norms_again: bool = False,
    gates_kept: bool = False,
) -> int:
    """Swaps embedding, blocks and final norm; returns the number of blocks. Weights of one product must be neighbours
    in memory by now, unless they may be `apart`. `longest` bounds the documents."""
    backbone = model.model
    if not fusable_decoder(model):
        return 0
    parts = [decoder_parts(layer, model.config) for layer in backbone.layers]
    held: dict[int, Frozen] = {}
    for p in () if apart else parts:
        for linears in (p.qkv, p.gate_up):
            if (beside := put_beside(linears)) is not None:
                held[id(linears[0])] = beside
            else:
                join_frozen(linears)
        if (below := put_below(p.down)) is not None:
            held[id(p.down)] = below
    both = [linears for p in parts for linears in (p.qkv, p.gate_up)]
    if not apart and not all(id(linears[0]) in held or lie_together(linears) for linears in both):
        return 0
    kinds = {p.layer_type for p in parts if p.turns}
    angles = {kind: Angles(backbone.rotary_emb, kind) for kind in kinds}
    for own in angles.values():
        own.up_to(longest)
    backbone.embed_tokens.forward = FusedDecoderTokens(backbone.embed_tokens)
    backbone.rotary_emb.forward = UnusedAngles()
    last = len(parts) - 1
    for index, (layer, p) in enumerate(zip(backbone.layers, parts)):
        turning = angles[p.layer_type] if p.turns else None
        layer.forward = FusedDecoderBlock(
            layer, p, turning, seed, index, pools=index == last, side=side, held=held, apart=apart,
            norms_again=norms_again, gates_kept=gates_kept,
        )  # fmt: skip
    backbone.norm.forward = FusedFinalNorm(DECODERS[model.config.model_type].norm(backbone.norm), side)
    return len(parts)
