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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from automodel.data.batch import PackedBatch
from automodel.kernels.embedding import word_embedding
from automodel.kernels.flat_parameters import BLOCK
from automodel.kernels.lazy_rows import lazy_rows_of
from automodel.kernels.linear import joined_linear
from automodel.kernels.rms_norm import rms_norm
from automodel.kernels.rope import rope_, rope_table
from automodel.kernels.rope_heads import HeadNorms, Heads, rope_heads
from automodel.kernels.side_stream import SideStream
from automodel.kernels.swiglu import swiglu_linear
from automodel.models.fused_decoder_attention import Attention, Documents, attend, attend_last, cut_behind
from automodel.models.fused_encoder import joined_view

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""transformers' names, and those of `kernels/swiglu.py`."""
WIDEST_HEAD = 256  # of flash attention


class Norm(NamedTuple):
    """An RMSNorm and the way its family computes it (`kernels/rms_norm.py`)."""

    weight: nn.Parameter
    eps: float
    offset: float
    round_first: bool

    def __call__(self, x: Tensor, residual: Tensor | None, side: SideStream | None) -> tuple[Tensor, Tensor]:
        style = {"eps": self.eps, "offset": self.offset, "round_first": self.round_first}
        return rms_norm(x, residual, self.weight, **style, side=side)


class Norms(NamedTuple):
    """Where a block normalises; the places its family leaves out are None."""

    before_attention: Norm | None
    after_attention: Norm | None
    """Of the branch alone, before it is added to the stream."""
    before_mlp: Norm | None
    after_mlp: Norm | None


@dataclass(frozen=True)
class Parts:
    """One layer, taken apart."""

    qkv: tuple[nn.Linear, ...]
    """Query, key and value, or one layer for all three (Phi-3)."""
    out: nn.Linear
    gate_up: tuple[nn.Linear, ...]
    """Gate and up, or one layer for both (Phi-3)."""
    down: nn.Linear
    norms: Norms
    head_norms: tuple[Norm, Norm] | None
    """Of queries and keys: head by head (Qwen3, Gemma 3) or over all heads (OLMo2), by the length of the weight."""
    heads: Heads
    scaling: float
    window: int | None
    attention_dropout: float
    turns: bool
    """Whether queries and keys are rotated (SmolLM3 leaves it out in some layers)."""
    layer_type: str | None
    """Gemma 3 has other angles in layers with a window."""
    activation: str


@dataclass(frozen=True)
class Decoder:
    """What is particular about a family's layers."""

    norms: tuple[str | None, str | None, str | None, str | None]
    """Names of the layer's norms, in the order of `Norms`."""
    offset: float = 0.0
    round_first: bool = True
    window: Callable[[Any, Any], int | None] = lambda attention, config: getattr(attention, "sliding_window", None)
    """(attention module, config) to the layer's window."""
    activation: str = "hidden_act"
    """Name of the config's key."""

    def norm(self, module: Any) -> Norm:
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        return Norm(module.weight, eps, self.offset, self.round_first)


def _no_window(attention: Any, config: Any) -> None:
    return None


def _window_of_config(attention: Any, config: Any) -> int | None:
    return getattr(config, "sliding_window", None)


_BEFORE = ("input_layernorm", None, "post_attention_layernorm", None)
_AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

DECODERS: dict[str, Decoder] = {
    "llama": Decoder(_BEFORE, window=_no_window),
    "mistral": Decoder(_BEFORE, window=_window_of_config),
    "qwen2": Decoder(_BEFORE),
    "qwen3": Decoder(_BEFORE),
    "smollm3": Decoder(_BEFORE),
    "phi3": Decoder(_BEFORE, window=_window_of_config),
    "gemma": Decoder(_BEFORE, offset=1.0, round_first=False, window=_no_window),
    "gemma3_text": Decoder(_AROUND, offset=1.0, round_first=False, activation="hidden_activation"),
    "olmo2": Decoder(_AFTER, round_first=False, window=_no_window),
}


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def fusable_decoder_config(config: Any) -> bool:
    """Whether models of this config have blocks of the known kind, as far as the config tells."""
    decoder = DECODERS.get(config.model_type)
    if decoder is None or getattr(config, decoder.activation) not in ACTIVATIONS:
        return False
    head_dim = head_dim_of(config)
    residual_dropout = getattr(config, "resid_pdrop", 0.0)  # Phi-3 has the key; published models leave it at 0
    softcap = getattr(config, "attn_logit_softcapping", None)
    known = head_dim % 8 == 0 and head_dim <= WIDEST_HEAD and not residual_dropout and softcap is None
    # Weights that are joined where they lie have to fill their blocks of the flat buffer.
    rows = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim, config.intermediate_size)
    joins = config.model_type == "phi3" or all(n * config.hidden_size % BLOCK == 0 for n in rows)
    return known and joins


def fusable_decoder(model: Any) -> bool:
    """Whether `fuse_decoder` will swap this model's layers once its parameters are flat."""
    return fusable_decoder_config(model.config) and all(p.requires_grad for p in model.model.parameters())


def decoder_parts(layer: Any, config: Any) -> Parts:
    decoder, attention, mlp = DECODERS[config.model_type], layer.self_attn, layer.mlp
    joined = hasattr(attention, "qkv_proj")
    head_norms = None
    if hasattr(attention, "q_norm"):
        head_norms = decoder.norm(attention.q_norm), decoder.norm(attention.k_norm)
    return Parts(
        qkv=(attention.qkv_proj,) if joined else (attention.q_proj, attention.k_proj, attention.v_proj),
        out=attention.o_proj,
        gate_up=(mlp.gate_up_proj,) if joined else (mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
        norms=Norms(*(None if name is None else decoder.norm(getattr(layer, name)) for name in decoder.norms)),
        head_norms=head_norms,
        heads=Heads(config.num_attention_heads, config.num_key_value_heads, attention.head_dim),
        scaling=attention.scaling,
        window=decoder.window(attention, config),
        attention_dropout=attention.attention_dropout,
        turns=bool(getattr(attention, "use_rope", True)),
        layer_type=getattr(attention, "layer_type", None),
        activation=ACTIVATIONS[getattr(config, decoder.activation)],
    )


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


class Stream(NamedTuple):
    """What one block hands to the next: a branch, and the stream it is still to be added to."""

    branch_TN: Tensor
    residual_TN: Tensor


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
    pools: bool
    """Whether this is the last block, which may run for some rows alone."""
    side: SideStream | None

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
            y, h = self._add(hidden_states[0], None, norms.before_attention)
        if self.pools and pooled_positions is not None:
            attended, h = self._attend_pooled(y, h, documents, pooled_positions)
        else:
            attended, h = self._attend(y, h, documents)
            if self.pools and read_positions is not None:
                attended, h = (t.index_select(0, read_positions) for t in (attended, h))
        x = self._branch(self._linear(attended, self.parts.out), norms.after_attention)
        return self._mlp(*self._add(x, h, norms.before_mlp))

    def _add(self, x: Tensor, h: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """(what the next product reads, the stream), both the plain sum where there is no norm."""
        if norm is not None:
            return norm(x, h, self.side)
        total = x if h is None else h + x
        return total, total

    def _branch(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else norm(x, None, self.side)[0]

    def _linear(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return self._product(x, (linear,))[0]

    def _product(self, x: Tensor, linears: tuple[nn.Linear, ...]) -> tuple[Tensor, Tensor]:
        """(all layers' outputs side by side, x to go on with)."""
        weights = _weights(linears)
        joined = joined_view(weights)
        assert joined is not None, "the weights of one product were moved apart after the model was fused"
        biases = [m.bias for m in linears if m.bias is not None]
        return joined_linear(x, joined, weights, biases, self.side)

    def _mlp(self, y: Tensor, h: Tensor) -> Stream:
        p = self.parts
        inner, around = self._product(y, p.gate_up)
        if p.norms.before_mlp is None:
            h = around  # the stream itself was read: both its gradients meet in the product's backward
        x = swiglu_linear(inner, p.down.weight, p.down.bias, p.activation, self.side)
        return Stream(self._branch(x, p.norms.after_mlp), h)

    def _how(self) -> Attention:
        p = self.parts
        return Attention(p.scaling, p.window, p.attention_dropout if self.layer.training else 0.0)

    def _attend(self, y: Tensor, h: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
        """(attention output, the stream)."""
        p = self.parts
        qkv, around = self._product(y, p.qkv)
        q, k, v = self._heads(qkv, documents.positions_T, documents.longest, p.heads)
        return attend(q, k, v, documents, self._how()), around if p.norms.before_attention is None else h

    def _attend_pooled(self, y: Tensor, h: Tensor, documents: Documents, pooled_R: Tensor) -> tuple[Tensor, Tensor]:
        """Both for the pooled rows alone, (R, …)."""
        p, heads = self.parts, self.parts.heads
        pieces = cut_behind(pooled_R, documents)
        y_B = y.index_select(0, pieces.queries_B)
        if len(p.qkv) == 1:
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

    def _heads(self, x_TW: Tensor, positions_T: Tensor, longest: int, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a product, as attention takes them; x is not to be used afterwards."""
        p = self.parts
        table = None if self.angles is None else self.angles.up_to(longest)
        norms = p.head_norms
        if norms is not None and norms[0].weight.shape[0] > heads.dim:
            return self._wide_heads(x_TW, positions_T, table, heads)
        if table is None:
            assert norms is None, "no family normalises heads that it does not turn"
            return heads.split(x_TW)
        head_norms = None if norms is None else HeadNorms(norms[0].weight, norms[1].weight, *norms[0][1:])
        return rope_heads(x_TW, positions_T, table, heads, head_norms, self.side)

    def _wide_heads(self, x_TW: Tensor, positions_T: Tensor, table: Tensor | None, heads: Heads):
        """OLMo2: norms over all query heads and over all key heads together."""
        norms = self.parts.head_norms
        assert norms is not None
        assert table is not None, "no family normalises heads that it does not turn"
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


def fuse_decoder(model: Any, side: SideStream | None, longest: int) -> int:
    """Swaps embedding, blocks and final norm; returns the number of blocks. Weights of one product must be neighbours
    in memory by now. `longest` bounds the documents."""
    backbone = model.model
    if not fusable_decoder(model):
        return 0
    parts = [decoder_parts(layer, model.config) for layer in backbone.layers]
    if any(joined_view(_weights(linears)) is None for p in parts for linears in (p.qkv, p.gate_up)):
        return 0
    kinds = {p.layer_type for p in parts if p.turns}
    angles = {kind: Angles(backbone.rotary_emb, kind) for kind in kinds}
    for own in angles.values():
        own.up_to(longest)
    backbone.embed_tokens.forward = FusedDecoderTokens(backbone.embed_tokens)
    last = len(parts) - 1
    for index, (layer, p) in enumerate(zip(backbone.layers, parts)):
        turning = angles[p.layer_type] if p.turns else None
        layer.forward = FusedDecoderBlock(layer, p, turning, pools=index == last, side=side)
    backbone.norm.forward = FusedFinalNorm(DECODERS[model.config.model_type].norm(backbone.norm), side)
    return len(parts)
