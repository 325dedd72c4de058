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

import torch
from torch import Tensor, nn

from automodel.kernels.add_norm import add_norm
from automodel.kernels.bias_gelu import bias_gelu
from automodel.kernels.linear import joined_linear


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
        return [self.query.weight, self.key.weight, self.value.weight]


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


def joined_view(parameters: list[nn.Parameter]) -> Tensor | None:
    """One (ΣO, I) tensor over weights that lie next to each other in one storage; None where they do not."""
    first = parameters[0]
    expected = first.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != expected or not parameter.is_contiguous():
            return None
        expected += parameter.numel() * parameter.element_size()
    rows = sum(p.shape[0] for p in parameters)
    return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1))


class FusedBlock:
    """Takes the place of one layer's `forward`. `seed` is the device tensor that every dropout of the step reads."""

    def __init__(self, layer: nn.Module, parts: Parts, qkv_weight: Tensor, seed: Tensor, site: int, last: bool):
        self.layer, self.parts, self.seed, self.site, self.last = layer, parts, seed, site, last
        self.qkv_weight = qkv_weight

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
            attended, residual = self._attend_pooled(x_TN, cu_seq_lens_q, max_length_q, pooled_positions, training)
        else:
            attended, residual = self._attend(x_TN, cu_seq_lens_q, max_length_q, training), x_TN
        return self._after_attention(attended, residual, training).unsqueeze(0)

    def _after_attention(self, attended: Tensor, residual: Tensor, training: bool) -> Tensor:
        p = self.parts
        h = self._add_norm(attended, p.out, residual, p.attention_norm, p.out_dropout if training else 0.0, 0)
        inner = bias_gelu(joined_linear(h, p.up.weight.detach(), [p.up.weight]), p.up.bias)
        return self._add_norm(inner, p.down, h, p.output_norm, p.down_dropout if training else 0.0, 1)

    def _add_norm(
        self, x: Tensor, linear: nn.Linear, residual: Tensor, norm: nn.LayerNorm, dropout: float, which: int
    ) -> Tensor:
        """LayerNorm(residual + dropout(linear(x))): the bias, dropout, residual and norm are one kernel."""
        return add_norm(
            joined_linear(x, linear.weight.detach(), [linear.weight]),
            residual,
            norm.weight,
            norm.bias,
            eps=norm.eps,
            linear_bias=linear.bias,
            dropout_p=dropout,
            seed=self.seed,
            site=2 * self.site + which,
        )

    def _attend(self, x_TN: Tensor, cu_seqlens: Tensor, longest: int, training: bool) -> Tensor:
        p = self.parts
        linears = (p.query, p.key, p.value)
        qkv = joined_linear(x_TN, self.qkv_weight, [m.weight for m in linears], [m.bias for m in linears])
        q, k, v = (t.unflatten(1, (p.heads, -1)) for t in qkv.chunk(3, dim=1))
        return self._flash(q, k, v, cu_seqlens, cu_seqlens, longest, longest, training)

    def _attend_pooled(
        self, x_TN: Tensor, cu_seqlens: Tensor, longest: int, pooled_R: Tensor, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention of one query a document: row r of `pooled_R` belongs to document r."""
        p, n = self.parts, self.parts.query.weight.shape[0]
        rows_RN = x_TN.index_select(0, pooled_R)
        q = joined_linear(rows_RN, self.qkv_weight[:n], [p.query.weight], [p.query.bias])
        kv = joined_linear(x_TN, self.qkv_weight[n:], [p.key.weight, p.value.weight], [p.key.bias, p.value.bias])
        q, k, v = (t.unflatten(1, (p.heads, -1)) for t in (q, *kv.chunk(2, dim=1)))
        documents = pooled_R.shape[0]
        one_each = torch.arange(documents + 1, device=x_TN.device, dtype=cu_seqlens.dtype)
        return self._flash(q, k, v, one_each, cu_seqlens[: documents + 1], 1, longest, training), rows_RN

    def _flash(self, q, k, v, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int, training: bool) -> Tensor:
        dropout = self.parts.attention_dropout if training else 0.0
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q, cu_k, longest_q, longest_k, dropout, False, False, scale=self.parts.scaling
        )[0]
        return out.flatten(1)


def fuse_encoder(model: Any, seed: Tensor) -> int:
    """Swaps every fusable layer of the model and returns how many; `unfuse_encoder` undoes it. Query, key and value
    weights must be neighbours in memory by now."""
    layers = fusable_layers(model)
    joined = [joined_view(parts.neighbours()) for _, parts in layers]
    if any(view is None for view in joined):
        return 0
    for index, ((layer, parts), qkv_weight) in enumerate(zip(layers, joined)):
        assert qkv_weight is not None
        layer.forward = FusedBlock(layer, parts, qkv_weight, seed, index, last=index == len(layers) - 1)
    return len(layers)


def unfuse_encoder(model: Any) -> None:
    for layer, _ in fusable_layers(model):
        layer.__dict__.pop("forward", None)
