"""The embeddings of BERT-like encoders over a packed stream: tables whose gradients need no sorting on the device
(`kernels/embedding.py`), and sum and norm in one kernel.

    y = dropout(LayerNorm(word[id] + position[p] + type[s]))

Where there are no text pairs every token has type 0, so that row is a bias, and its gradient a column sum.
The swap is made on the instance, like that of the blocks (`fused_encoder.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from automodel.data.batch import PackedBatch
from automodel.kernels.add_norm import add_norm
from automodel.kernels.embedding import position_embedding, word_embedding
from automodel.kernels.lazy_rows import lazy_rows_of
from automodel.kernels.side_stream import SideStream


class FusedEmbeddings:
    """Takes the place of an embedding module's `forward`. `bind` says which packed batch is being read."""

    def __init__(self, module: Any, position_offset: int, side: SideStream | None = None):
        self.module, self.offset, self.side = module, position_offset, side
        self.batch: PackedBatch | None = None

    def bind(self, batch: PackedBatch) -> None:
        self.batch = batch

    def __call__(
        self,
        input_ids: Tensor | None = None,
        *args: Any,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        batch, module = self.batch, self.module
        assert batch is not None, "bind the packed batch before the model runs"
        words, places = module.word_embeddings, module.position_embeddings
        x_TN = word_embedding(
            batch.input_ids_T, words.weight, batch.token_runs_2T, words.padding_idx, lazy_rows_of(words.weight)
        )
        types = getattr(module, "token_type_embeddings", None)
        type_bias = None
        type_ids_T = batch.token_type_ids_T
        if types is not None and type_ids_T is None:
            type_bias = types.weight[0]
        elif types is not None and type_ids_T is not None:
            # A product with one-hot rows: its gradient is a product too, where a scatter would meet in two rows.
            kinds = torch.arange(types.num_embeddings, device=x_TN.device)
            x_TN = x_TN + (type_ids_T[:, None] == kinds).to(x_TN.dtype) @ types.weight
        positions = position_embedding(
            batch.position_ids_T + self.offset,
            places.weight,
            batch.cu_seqlens_D,
            self.offset,
            places.padding_idx,
            self.side,
        )
        norm = module.LayerNorm
        out = add_norm(x_TN, positions, norm.weight, norm.bias, eps=norm.eps, linear_bias=type_bias)
        assert isinstance(out, Tensor)
        return torch.nn.functional.dropout(out, module.dropout.p, module.training).unsqueeze(0)
