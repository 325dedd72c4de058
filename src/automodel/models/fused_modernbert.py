"""ModernBERT's pre-norm blocks, fused like the post-norm ones of `fused_encoder.py`.

    h, y   = h + m, LayerNorm of it                        one kernel, both results; m is what the block before left
    q,k,v  = y Wqkvᵀ, rotated in place                     full or sliding window, by layer
    h, y   = h + dropout(a Woᵀ), LayerNorm of it           one kernel, both results
    m      = (gelu(u) · g) W2ᵀ,   u, g = y W1ᵀ             to be added in the next block, or in the final norm

The last block of a classifier that pools the first token runs only for that token, if its attention is full. Blocks
with biases, or with dropout inside the MLP, are left as they are. Angles are fp32 from a table; stock code rounds them
to the model's dtype.

Legend: T tokens, R pooled rows, N width, H heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from automodel.data.batch import PackedBatch
from automodel.kernels.add_norm import add_norm
from automodel.kernels.attention import ATTENTION_SITES, Attention, Turned, can_turn
from automodel.kernels.attention import attention as packed_attention
from automodel.kernels.bias_gelu import geglu
from automodel.kernels.embedding import word_embedding
from automodel.kernels.lazy_rows import lazy_rows_of
from automodel.kernels.linear import joined_linear
from automodel.kernels.pooled_attention import pooled_attention
from automodel.kernels.rope import rope_, rope_table
from automodel.kernels.side_stream import SideStream
from automodel.models.block_stream import Stream, UnusedAngles


def fusable_modernbert(model: Any) -> bool:
    """Whether every block is of the plain kind: no biases, no dropout in the MLP, exact GELU, all of it trained."""
    config = model.config
    plain = not (config.attention_bias or config.mlp_bias or config.norm_bias or config.mlp_dropout)
    return plain and config.hidden_activation == "gelu" and all(p.requires_grad for p in model.model.parameters())


class FusedTokens:
    """Takes the place of the embedding module's `forward`, and knows which batch is being read."""

    def __init__(self, module: Any):
        self.module = module
        self.batch: PackedBatch | None = None

    def bind(self, batch: PackedBatch) -> None:
        self.batch = batch

    def __call__(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        assert self.batch is not None, "bind the packed batch before the model runs"
        tokens, norm = self.module.tok_embeddings, self.module.norm
        batch, table = self.batch, tokens.weight
        rows = word_embedding(batch.input_ids_T, table, batch.token_runs_2T, tokens.padding_idx, lazy_rows_of(table))
        out = add_norm(rows, None, norm.weight, norm.bias, eps=norm.eps)
        assert isinstance(out, Tensor)
        return nn.functional.dropout(out, self.module.drop.p, self.module.training).unsqueeze(0)


@dataclass
class FusedModernBlock:
    """Takes the place of one layer's `forward`."""

    layer: Any
    tokens: FusedTokens
    table: Tensor
    """Angles of this layer's kind of attention."""
    seed: Tensor
    site: int
    pools: bool
    """Whether this is the last block and may run for the pooled tokens alone."""
    side: SideStream | None

    def __call__(
        self,
        hidden_states: Tensor | Stream,
        *args: Any,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        pooled_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Stream:
        h_TN, y_TN = self._normed(hidden_states)
        if self.pools and pooled_positions is not None:
            attended, h = self._attend_pooled(y_TN, h_TN, cu_seq_lens_q, pooled_positions)
        else:
            attended, h = self._attend(y_TN, cu_seq_lens_q, max_length_q), h_TN
        return self._after_attention(attended, h)

    def _normed(self, before: Tensor | Stream) -> tuple[Tensor, Tensor]:
        """(h to go on with, LayerNorm(h)); the first layer of ModernBERT has no norm there."""
        norm = self.layer.attn_norm
        if isinstance(norm, nn.Identity):
            assert isinstance(before, Tensor)
            return before.squeeze(0), before.squeeze(0)
        x, residual = (before.squeeze(0), None) if isinstance(before, Tensor) else before
        # The products around it read the gradients and change none, so both may be one tensor.
        y, h = add_norm(x, residual, norm.weight, norm.bias, eps=norm.eps, return_sum=True, shares=True)
        return h, y

    def _linear(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        return joined_linear(x, weight.detach(), [weight], side=self.side)[0]

    def _after_attention(self, attended: Tensor, h: Tensor) -> Stream:
        attention, mlp, norm = self.layer.attn, self.layer.mlp, self.layer.mlp_norm
        y, h = add_norm(
            self._linear(attended, attention.Wo.weight),
            h,
            norm.weight,
            norm.bias,
            eps=norm.eps,
            dropout_p=getattr(attention.out_drop, "p", 0.0) if self.layer.training else 0.0,
            seed=self.seed,
            site=self.site,
            return_sum=True,
            shares=True,
        )
        return Stream(self._linear(geglu(self._linear(y, mlp.Wi.weight)), mlp.Wo.weight), h)

    def _attend(self, y_TN: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        attention = self.layer.attn
        heads = attention.config.num_attention_heads
        assert self.tokens.batch is not None
        qkv, how = self._linear(y_TN, attention.Wqkv.weight), self._how()
        turned = Turned(self.tokens.batch.position_ids_T, self.table)
        if not can_turn(self.table, how):
            qkv, turned = rope_(qkv, *turned, 2 * heads), None
        return packed_attention(qkv, cu_seqlens, longest, how, self.seed, turned)

    def _how(self) -> Attention:
        attention = self.layer.attn
        heads = attention.config.num_attention_heads
        return Attention(
            heads=heads,
            key_heads=heads,
            head_dim=attention.head_dim,
            scale=attention.head_dim**-0.5,
            window=-1 if attention.sliding_window is None else attention.sliding_window - 1,
            dropout=attention.attention_dropout if self.layer.training else 0.0,
            site=ATTENTION_SITES + self.site,
        )

    def _attend_pooled(self, y_TN: Tensor, h_TN: Tensor, cu_seqlens: Tensor, pooled_R: Tensor) -> tuple[Tensor, Tensor]:
        """One query a document, as in `fused_encoder.py`."""
        batch, weight = self.tokens.batch, self.layer.attn.Wqkv.weight
        assert batch is not None
        heads, n = self.layer.attn.config.num_attention_heads, y_TN.shape[1]
        q = nn.functional.linear(y_TN.index_select(0, pooled_R), weight[:n])
        kv = nn.functional.linear(y_TN, weight[n:])
        q = rope_(q, batch.position_ids_T.index_select(0, pooled_R), self.table, heads)
        kv = rope_(kv, batch.position_ids_T, self.table, heads)
        attended = pooled_attention(q, kv, cu_seqlens, self._how(), self.seed)
        return attended, h_TN.index_select(0, pooled_R)


@dataclass
class FusedModernFinalNorm:
    """Takes the place of the final norm's `forward`: adds what the last block left to be added."""

    norm: Any

    def __call__(self, hidden_states: Stream) -> Tensor:
        norm = self.norm
        out = add_norm(*hidden_states, norm.weight, norm.bias, eps=norm.eps, shares=True)
        assert isinstance(out, Tensor)
        return out.unsqueeze(0)


def fuse_modernbert(model: Any, seed: Tensor, side: SideStream | None, longest: int) -> int:
    """Swaps embeddings and blocks; returns the number of blocks. `longest` bounds the positions."""
    if not fusable_modernbert(model):
        return 0
    backbone, rotary = model.model, model.model.rotary_emb
    tokens = backbone.embeddings.forward = FusedTokens(backbone.embeddings)
    tables = {
        kind: rope_table(getattr(rotary, f"{kind}_inv_freq"), longest, getattr(rotary, f"{kind}_attention_scaling"))
        for kind in set(model.config.layer_types)
    }
    backbone.final_norm.forward = FusedModernFinalNorm(backbone.final_norm)
    rotary.forward = UnusedAngles()
    last = len(backbone.layers) - 1
    for index, layer in enumerate(backbone.layers):
        pools = index == last and layer.attn.sliding_window is None and _pools_first_token(model)
        layer.forward = FusedModernBlock(layer, tokens, tables[layer.attention_type], seed, index, pools, side)
    return len(backbone.layers)


def _pools_first_token(model: Any) -> bool:
    return getattr(model.config, "classifier_pooling", "cls") == "cls"
