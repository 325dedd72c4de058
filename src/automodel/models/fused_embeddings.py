"""The embeddings of BERT-like encoders over a packed stream: tables whose gradients need no sorting on the device
(`kernels/embedding.py`), and rows, sum, norm and dropout in one kernel (`kernels/embed_norm.py`).

    y = dropout(LayerNorm(word[id] + position[p] + type[s]))

Where there are no text pairs every token has type 0, so that row is a bias, and its gradient a column sum.
The swap is made on the instance, like that of the blocks (`fused_encoder.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from automodel.data.batch import PackedBatch
from automodel.kernels.add_norm import Norm, add_norm
from automodel.kernels.embed_norm import Stream, can_embed_norm, embed_norm
from automodel.kernels.embedding import position_embedding, word_embedding
from automodel.kernels.lazy_rows import lazy_rows_of
from automodel.kernels.linear import JoinedBiases
from automodel.kernels.side_stream import SideStream


class FusedEmbeddings:
    """Takes the place of an embedding module's `forward`. `bind` says which packed batch is being read. `seed` is the
    device tensor that every dropout of the step reads."""

    def __init__(
        self,
        module: Any,
        position_offset: int,
        seed: Tensor,
        site: int,
        side: SideStream | None = None,
        biases: JoinedBiases | None = None,
    ):
        """biases: of the blocks that follow; gathered here, where a forward pass begins."""
        self.module, self.offset, self.seed, self.site, self.side = module, position_offset, seed, site, side
        self.biases = biases
        self.batch: PackedBatch | None = None

    def bind(self, batch: PackedBatch) -> None:
        self.batch = batch

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        batch = self.batch
        assert batch is not None, "bind the packed batch before the model runs"
        if self.biases is not None:
            self.biases.gather()
        runs_2T = batch.token_runs_2T
        plain = batch.token_type_ids_T is None and (runs_2T is not None or not torch.is_grad_enabled())
        together = plain and can_embed_norm(self.module.word_embeddings.weight)
        return (self._together(batch, runs_2T) if together else self._in_parts(batch)).unsqueeze(0)

    @property
    def _dropout(self) -> float:
        return self.module.dropout.p if self.module.training else 0.0

    @property
    def _types(self) -> Any:
        return getattr(self.module, "token_type_embeddings", None)

    def _together(self, batch: PackedBatch, runs_2T: Tensor | None) -> Tensor:
        words, places, norm = self.module.word_embeddings, self.module.position_embeddings, self.module.LayerNorm
        return embed_norm(
            Stream(batch.input_ids_T, batch.position_ids_T, batch.cu_seqlens_D, runs_2T),
            words.weight,
            places.weight,
            norm.weight,
            norm.bias,
            None if self._types is None else self._types.weight[0],
            norm=Norm(norm.eps, self._dropout, self.seed if self._dropout else None, self.site),
            offset=self.offset,
            padding_id=words.padding_idx,
            lazy=lazy_rows_of(words.weight),
            side=self.side,
        )

    def _in_parts(self, batch: PackedBatch) -> Tensor:
        """Text pairs, whose tokens have a type each, or a batch whose tokens are in no order."""
        words, places, norm = self.module.word_embeddings, self.module.position_embeddings, self.module.LayerNorm
        x_TN = word_embedding(
            batch.input_ids_T, words.weight, batch.token_runs_2T, words.padding_idx, lazy_rows_of(words.weight)
        )
        type_bias = None
        if self._types is not None and batch.token_type_ids_T is None:
            type_bias = self._types.weight[0]
        elif self._types is not None and batch.token_type_ids_T is not None:
            # A product with one-hot rows: its gradient is a product too, where a scatter would meet in two rows.
            kinds = torch.arange(self._types.num_embeddings, device=x_TN.device)
            x_TN = x_TN + (batch.token_type_ids_T[:, None] == kinds).to(x_TN.dtype) @ self._types.weight
        positions = position_embedding(
            batch.position_ids_T + self.offset,
            places.weight,
            batch.cu_seqlens_D,
            self.offset,
            places.padding_idx,
            self.side,
        )
        out = add_norm(
            x_TN,
            positions,
            norm.weight,
            norm.bias,
            eps=norm.eps,
            linear_bias=type_bias,
            dropout_p=self._dropout,
            seed=self.seed,
            site=self.site,
            drop_last=True,
        )
        assert isinstance(out, Tensor)
        return out
