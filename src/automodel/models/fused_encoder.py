"""Post-norm encoder blocks in eight kernels forward: BERT, RoBERTa, XLM-R, CamemBERT, ELECTRA, DistilBERT.

A stock layer of these families launches about fifty kernels in a step, most of them over tensors so small that the
launch is the cost. The fused block computes the same function with the same parameters:

    q, k, v = x [Wq; Wk; Wv]ᵀ + b        one product: the three weights lie next to each other in the flat buffer
    a       = attention(q, k, v)          variable-length flash attention, dropout inside
    h       = LayerNorm(x + dropout(a Woᵀ + bo))
    y       = LayerNorm(h + dropout(gelu(h W1ᵀ + b1) W2ᵀ + b2))

and gradients of the weights go straight into the optimizer's flat buffer (`kernels/linear.py`). In the last block of a
classifier only the pooled token of each document is read afterwards, so queries, attention output and MLP are computed
for those rows alone, with keys and values of every token. Both are exact: `tests/gpu` holds them to the stock layer.

The swap is made on the instances (`layer.forward`), from a table, and can be undone. Parameters keep their names.

Legend: T tokens, R pooled rows, N width, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from automodel.kernels.add_norm import add_norm
from automodel.kernels.bias_gelu import bias_gelu
from automodel.kernels.linear import Sunk, sunk_linear


class FlatParameters(Protocol):
    """What the fused block needs of the flat parameter store: joined views of neighbours and their gradients."""

    def joined(self, parameters: list[nn.Parameter]) -> Sunk: ...


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

    def neighbours(self) -> list[list[nn.Parameter]]:
        """Parameters that must lie next to each other in the flat buffer."""
        linears = (self.query, self.key, self.value)
        return [[m.weight for m in linears], [m.bias for m in linears]]


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
    """Where a family keeps its layers, and how one comes apart."""

    layers: Callable[[Any], Any]
    parts: Callable[[Any, Any], Parts]


ENCODERS: dict[str, Encoder] = {
    "bert": Encoder(lambda m: m.bert.encoder.layer, _bert_parts),
    "roberta": Encoder(lambda m: m.roberta.encoder.layer, _bert_parts),
    "xlm-roberta": Encoder(lambda m: m.roberta.encoder.layer, _bert_parts),
    "camembert": Encoder(lambda m: m.roberta.encoder.layer, _bert_parts),
    "electra": Encoder(lambda m: m.electra.encoder.layer, _bert_parts),
    "distilbert": Encoder(lambda m: m.distilbert.transformer.layer, _distilbert_parts),
}


def fusable_layers(model: Any) -> list[tuple[Any, Parts]]:
    """The layers that can be fused, with their parts; empty where the family or its activation is not in the table."""
    encoder = ENCODERS.get(model.config.model_type)
    if encoder is None:
        return []
    found = [(layer, encoder.parts(layer, model.config)) for layer in encoder.layers(model)]
    return found if all(p.activation == "gelu" for _, p in found) else []


class FusedBlock:
    """Takes the place of one layer's `forward`. `seed` is the device tensor that every dropout of the step reads."""

    def __init__(self, layer: nn.Module, parts: Parts, flat: FlatParameters, seed: Tensor, site: int, last: bool):
        self.layer, self.parts, self.seed, self.site, self.last = layer, parts, seed, site, last
        weights, biases = parts.neighbours()
        self.qkv_weight, self.qkv_bias = flat.joined(weights), flat.joined(biases)
        self.out, self.up, self.down = (flat.joined([m.weight]) for m in (parts.out, parts.up, parts.down))

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
        training = self.layer.training
        x_TN = hidden_states[0]
        if self.last and pooled_positions is not None:
            attended, rest = self._attend_pooled(x_TN, cu_seq_lens_q, max_length_q, pooled_positions, training)
        else:
            attended, rest = self._attend(x_TN, cu_seq_lens_q, max_length_q, training), x_TN
        return self._after_attention(attended, rest, training).unsqueeze(0)

    def _after_attention(self, attended: Tensor, residual: Tensor, training: bool) -> Tensor:
        p = self.parts
        h = add_norm(
            sunk_linear(attended, self.out),
            residual,
            p.attention_norm.weight,
            p.attention_norm.bias,
            eps=p.attention_norm.eps,
            linear_bias=p.out.bias,
            dropout_p=p.out_dropout if training else 0.0,
            seed=self.seed,
            site=2 * self.site,
        )
        inner = bias_gelu(sunk_linear(h, self.up), p.up.bias)
        return add_norm(
            sunk_linear(inner, self.down),
            h,
            p.output_norm.weight,
            p.output_norm.bias,
            eps=p.output_norm.eps,
            linear_bias=p.down.bias,
            dropout_p=p.down_dropout if training else 0.0,
            seed=self.seed,
            site=2 * self.site + 1,
        )

    def _attend(self, x_TN: Tensor, cu_seqlens: Tensor, longest: int, training: bool) -> Tensor:
        qkv = sunk_linear(x_TN, self.qkv_weight, self.qkv_bias)
        q, k, v = (t.unflatten(1, (self.parts.heads, -1)) for t in qkv.chunk(3, dim=1))
        return self._flash(q, k, v, cu_seqlens, cu_seqlens, longest, longest, training)

    def _attend_pooled(
        self, x_TN: Tensor, cu_seqlens: Tensor, longest: int, pooled_R: Tensor, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention of one query a document: row r of `pooled_R` belongs to document r."""
        n = x_TN.shape[1]
        rows_RN = x_TN.index_select(0, pooled_R)
        q_weight, kv_weight = _rows(self.qkv_weight, 0, n), _rows(self.qkv_weight, n, 3 * n)
        q_bias, kv_bias = _rows(self.qkv_bias, 0, n), _rows(self.qkv_bias, n, 3 * n)
        q = sunk_linear(rows_RN, q_weight, q_bias).unflatten(1, (self.parts.heads, -1))
        kv = sunk_linear(x_TN, kv_weight, kv_bias)
        k, v = (t.unflatten(1, (self.parts.heads, -1)) for t in kv.chunk(2, dim=1))
        documents = pooled_R.shape[0]
        one_each = torch.arange(documents + 1, device=x_TN.device, dtype=cu_seqlens.dtype)
        return self._flash(q, k, v, one_each, cu_seqlens[: documents + 1], 1, longest, training), rows_RN

    def _flash(self, q, k, v, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int, training: bool) -> Tensor:
        dropout = self.parts.attention_dropout if training else 0.0
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q, cu_k, longest_q, longest_k, dropout, False, False, scale=self.parts.scaling
        )[0]
        return out.flatten(1)


def _rows(sunk: Sunk, start: int, end: int) -> Sunk:
    return Sunk(sunk.value[start:end], sunk.sink[start:end])


def fuse_encoder(model: Any, flat: FlatParameters, seed: Tensor) -> int:
    """Swaps every fusable layer of the model and returns how many; `unfuse_encoder` undoes it."""
    layers = fusable_layers(model)
    for index, (layer, parts) in enumerate(layers):
        layer.forward = FusedBlock(layer, parts, flat, seed, index, last=index == len(layers) - 1)
    return len(layers)


def unfuse_encoder(model: Any) -> None:
    for layer, _ in fusable_layers(model):
        layer.__dict__.pop("forward", None)
