"""Post-norm encoder blocks in eight kernels forward: BERT, RoBERTa, XLM-R, CamemBERT, ELECTRA, DistilBERT.

A stock layer of these families launches about fifty kernels in a step, most of them over tensors so small that the
launch is the cost. The fused block computes the same function with the same parameters:

    q, k, v = x [Wq; Wk; Wv]ᵀ + b        one product: the three weights lie next to each other in the flat buffer
    a       = attention(q, k, v)          variable-length flash attention, dropout inside
    h       = LayerNorm(x + dropout(a Woᵀ + bo))
    y       = LayerNorm(h + dropout(gelu(h W1ᵀ + b1) W2ᵀ + b2))

with one product each way for query, key and value (`kernels/linear.py`). In the last block of a classifier only the
pooled token of each document is read afterwards, so queries, attention output and MLP are computed
for those rows alone, with keys and values of every token. Both are exact: `tests/gpu` holds them to the stock layer.

The swap is made on the instances (`layer.forward`), from a table, and can be undone. Parameters keep their names.

Legend: T tokens, R pooled rows, N width, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from automodel.kernels.add_norm import add_norm
from automodel.kernels.attention import ATTENTION_SITES, Attention, attention
from automodel.kernels.bias_gelu import bias_gelu
from automodel.kernels.linear import JoinedBiases, joined_linear
from automodel.kernels.pooled_attention import pooled_attention
from automodel.kernels.side_by_side import joined_view
from automodel.kernels.side_stream import SideStream
from automodel.models.families import family_of
from automodel.models.fused_embeddings import FusedEmbeddings
from automodel.models.fused_modernbert import fusable_modernbert, fuse_modernbert


@dataclass(frozen=True)
class Parts:
    """One layer, taken apart."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    attention_norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear
    output_norm: nn.LayerNorm
    heads: int
    scaling: float
    attention_dropout: float
    """On the attention weights."""
    out_dropout: float
    """On the attention's output, before the residual."""
    down_dropout: float
    """On the MLP's output, before the residual."""
    activation: str

    def neighbours(self) -> list[nn.Parameter]:
        """Parameters that must lie next to each other in memory, in this order."""
        return [m.weight for m in (self.query, self.key, self.value)]  # ty: ignore[invalid-return-type]


def _bert_parts(layer: Any, config: Any) -> Parts:
    attention, own = layer.attention, layer.attention.self
    return Parts(
        query=own.query,
        key=own.key,
        value=own.value,
        out=attention.output.dense,
        attention_norm=attention.output.LayerNorm,
        up=layer.intermediate.dense,
        down=layer.output.dense,
        output_norm=layer.output.LayerNorm,
        heads=own.num_attention_heads,
        scaling=own.attention_head_size**-0.5,
        attention_dropout=own.dropout.p,
        out_dropout=attention.output.dropout.p,
        down_dropout=layer.output.dropout.p,
        activation=config.hidden_act,
    )


def _distilbert_parts(layer: Any, config: Any) -> Parts:
    attention, ffn = layer.attention, layer.ffn
    return Parts(
        query=attention.q_lin,
        key=attention.k_lin,
        value=attention.v_lin,
        out=attention.out_lin,
        attention_norm=layer.sa_layer_norm,
        up=ffn.lin1,
        down=ffn.lin2,
        output_norm=layer.output_layer_norm,
        heads=attention.n_heads,
        scaling=attention.attention_head_size**-0.5,
        attention_dropout=attention.dropout.p,
        out_dropout=0.0,  # DistilBERT has none there
        down_dropout=ffn.dropout.p,
        activation=config.activation,
    )


@dataclass(frozen=True)
class Encoder:
    """Where a family keeps its embeddings and layers, and how a layer comes apart."""

    embeddings: Callable[[Any], Any]
    layers: Callable[[Any], Any]
    parts: Callable[[Any, Any], Parts]


_ROBERTA = Encoder(lambda m: m.roberta.embeddings, lambda m: m.roberta.encoder.layer, _bert_parts)

ENCODERS: dict[str, Encoder] = {
    "bert": Encoder(lambda m: m.bert.embeddings, lambda m: m.bert.encoder.layer, _bert_parts),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": Encoder(lambda m: m.electra.embeddings, lambda m: m.electra.encoder.layer, _bert_parts),
    "distilbert": Encoder(
        lambda m: m.distilbert.embeddings, lambda m: m.distilbert.transformer.layer, _distilbert_parts
    ),
}


FUSABLE = (*ENCODERS, "modernbert")
"""Model types that have fused blocks."""


def fusable_layers(model: Any) -> list[tuple[Any, Parts]]:
    """The layers that can be fused, with their parts; empty where the family or its activation is not in the table."""
    encoder = ENCODERS.get(model.config.model_type)
    if encoder is None:
        return []
    found = [(layer, encoder.parts(layer, model.config)) for layer in encoder.layers(model)]
    plain = all(p.activation == "gelu" for _, p in found)
    trainable = all(p.requires_grad for layer, _ in found for p in layer.parameters())
    return found if plain and trainable else []


def is_fusable(model: Any) -> bool:
    """Whether `fuse_encoder` will swap this model's embeddings and layers, once its parameters are flat."""
    if model.config.model_type == "modernbert":
        return fusable_modernbert(model)
    return bool(fusable_layers(model))


class FusedBlock:
    """Takes the place of one layer's `forward`. `seed` is the device tensor that every dropout of the step reads."""

    def __init__(
        self,
        layer: nn.Module,
        parts: Parts,
        qkv_weight: Tensor,
        seed: Tensor,
        site: int,
        pools: bool,
        side: SideStream | None,
        qkv_bias: Tensor | None = None,
    ):
        self.layer, self.parts, self.seed, self.site, self.pools = layer, parts, seed, site, pools
        self.qkv_weight, self.qkv_bias, self.side = qkv_weight, qkv_bias, side

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        pooled_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        x_TN = hidden_states.squeeze(0)  # the backward of an index would write a zeroed copy
        if self.pools and pooled_positions is not None:
            attended, residual = self._attend_pooled(x_TN, cu_seq_lens_q, pooled_positions)
        else:
            attended, residual = self._attend(x_TN, cu_seq_lens_q, max_length_q)
        p = self.parts
        h = self._add_norm(attended, p.out, residual, p.attention_norm, p.out_dropout, 0)
        inner, h = joined_linear(h, p.up.weight.detach(), [p.up.weight], side=self.side)
        activated = bias_gelu(inner, p.up.bias, side=self.side)
        return self._add_norm(activated, p.down, h, p.output_norm, p.down_dropout, 1).unsqueeze(0)

    def _add_norm(
        self, x: Tensor, linear: nn.Linear, residual: Tensor, norm: nn.LayerNorm, dropout: float, which: int
    ) -> Tensor:
        """LayerNorm(residual + dropout(linear(x))): the bias, dropout, residual and norm are one kernel."""
        projected, _ = joined_linear(x, linear.weight.detach(), [linear.weight], side=self.side)
        out = add_norm(
            projected,
            residual,
            norm.weight,
            norm.bias,
            eps=norm.eps,
            linear_bias=linear.bias,
            dropout_p=dropout if self.layer.training else 0.0,
            seed=self.seed,
            site=2 * self.site + which,
            side=self.side,
        )
        assert isinstance(out, Tensor)
        return out

    def _how(self) -> Attention:
        p = self.parts
        return Attention(
            heads=p.heads,
            key_heads=p.heads,
            head_dim=p.query.weight.shape[0] // p.heads,
            scale=p.scaling,
            dropout=p.attention_dropout if self.layer.training else 0.0,
            site=ATTENTION_SITES + self.site,
        )

    def _attend(self, x_TN: Tensor, cu_seqlens: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """(attention output, the residual stream)."""
        linears = (self.parts.query, self.parts.key, self.parts.value)
        weights, biases = [m.weight for m in linears], [m.bias for m in linears]
        qkv, x_TN = joined_linear(x_TN, self.qkv_weight, weights, biases, self.side, self.qkv_bias)
        return attention(qkv, cu_seqlens, longest, self._how(), self.seed), x_TN

    def _attend_pooled(self, x_TN: Tensor, cu_seqlens: Tensor, pooled_R: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of one query a document: row r of `pooled_R` belongs to document r."""
        p, n = self.parts, self.parts.query.weight.shape[0]
        key_value = [p.key.weight, p.value.weight], [p.key.bias, p.value.bias]
        kv_bias = None if self.qkv_bias is None else self.qkv_bias[n:]
        kv, x_TN = joined_linear(x_TN, self.qkv_weight[n:], *key_value, self.side, kv_bias)
        rows_RN = x_TN.index_select(0, pooled_R)
        q, rows_RN = joined_linear(rows_RN, self.qkv_weight[:n], [p.query.weight], [p.query.bias])
        return pooled_attention(q, kv, cu_seqlens, self._how(), self.seed), rows_RN


def fuse_encoder(model: Any, seed: Tensor, side: SideStream | None = None, longest: int = 512) -> int:
    """Swaps embeddings and layers of the model and returns how many layers (`fuse.py` undoes it). Query, key and
    value weights must be neighbours in memory by now. Whoever passes `side` joins it after every backward pass.
    `longest` bounds the documents."""
    if model.config.model_type == "modernbert":
        return fuse_modernbert(model, seed, side, longest)
    layers = fusable_layers(model)
    joined = [joined_view(parts.neighbours()) for _, parts in layers]
    if not layers or any(view is None for view in joined):
        return 0
    biases = [[m.bias for m in (parts.query, parts.key, parts.value)] for _, parts in layers]
    gathered = JoinedBiases(biases) if JoinedBiases.can_take(biases) else None
    for index, ((layer, parts), qkv_weight) in enumerate(zip(layers, joined)):
        assert qkv_weight is not None
        bias, last = None if gathered is None else gathered.of(index), index == len(layers) - 1
        layer.forward = FusedBlock(layer, parts, qkv_weight, seed, index, last, side, bias)
    embeddings = ENCODERS[model.config.model_type].embeddings(model)
    offset = family_of(model.config).position_offset(model.config)
    embeddings.forward = FusedEmbeddings(embeddings, offset, seed, 2 * len(layers), side, gathered)
    return len(layers)


def swapped_encoder(model: Any) -> tuple[Any, list[Any]]:
    """The embedding module and the layers that `fuse_encoder` swaps."""
    if model.config.model_type == "modernbert":
        return model.model.embeddings, list(model.model.layers)
    encoder = ENCODERS[model.config.model_type]
    return encoder.embeddings(model), list(encoder.layers(model))
