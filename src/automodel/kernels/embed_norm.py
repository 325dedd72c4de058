"""Embeddings of a BERT-like encoder: rows of two tables, their sum, norm and dropout in one kernel.

    y_t = dropout(LayerNorm(word[id_t] + position[p_t] + type_bias))

It is `add_norm` over rows that are read where they lie in the tables, so neither table's rows are copied out first: one
launch where gathering twice, adding, norming and dropping out are five. Backward, the gradient of the sum is that of
both rows; tables take it as in `embedding.py`, the word table's into `lazy` where rows are updated when needed.

Shapes: T tokens, V and P rows of the tables, N width, D documents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.add_norm import (
    WIDEST,
    Norm,
    Normed,
    add_norm_reference,
    give_gradients,
    launch_backward,
    launch_forward,
    slots_of,
)
from automodel.kernels.dispatch import runs_triton
from automodel.kernels.embedding import position_gradients, word_gradients
from automodel.kernels.lazy_rows import LazyRows
from automodel.kernels.side_stream import SideStream


class Stream(NamedTuple):
    """The tokens of a packed batch."""

    ids_T: Tensor
    positions_T: Tensor
    """From 0 in every document."""
    cu_seqlens_D: Tensor
    runs_2T: Tensor | None
    """`PackedBatch.token_runs_2T`; needed for gradients only."""


def embed_norm_reference(
    stream: Stream, words_VN, places_PN, weight, norm_bias, type_bias=None, *, offset: int = 0, norm: Norm, keep=None
) -> Tensor:
    words_TN, places_TN = words_VN[stream.ids_T], places_PN[stream.positions_T + offset]
    return add_norm_reference(
        words_TN, places_TN, weight, norm_bias,
        eps=norm.eps, linear_bias=type_bias, dropout_p=norm.dropout_p, keep=keep, drop_last=True,
    )[0]  # fmt: skip


class _EmbedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Stream, how: tuple, words_VN, places_PN, weight, norm_bias, type_bias) -> Tensor:
        norm, offset, _, lazy, side = how
        if lazy is not None:
            assert stream.runs_2T is not None, "rows that are updated when needed must be known"
            lazy.catch_up(stream.ids_T, stream.runs_2T)
        y_TN, h_TN, mean_T, rstd_T = launch_forward(
            words_VN, places_PN[offset:], weight, norm_bias, type_bias, norm, True, stream.ids_T, stream.positions_T
        )
        ctx.save_for_backward(h_TN, mean_T, rstd_T, weight)
        ctx.stream, ctx.how, ctx.side, ctx.words, ctx.places = stream, how, side, words_VN, places_PN
        ctx.parameters = [p for p in (weight, norm_bias, type_bias) if p is not None]
        ctx.bias_dtypes = tuple(None if b is None else b.dtype for b in (norm_bias, type_bias))
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor):
        (h_TN, mean_T, rstd_T, weight), stream = ctx.saved_tensors, ctx.stream
        norm, offset, padding_id, lazy, side = ctx.how
        slots = slots_of(ctx.needs_input_grad[4:7], ctx.bias_dtypes)
        normed = Normed(dy_TN, h_TN, mean_T, rstd_T)
        drows_TN, _, partial = launch_backward(
            dy_TN.contiguous(), None, normed, weight, norm, slots, ctx.words.dtype, None
        )
        dwords_VN = None
        if lazy is not None or ctx.needs_input_grad[2]:
            assert stream.runs_2T is not None, "gradients of a table need its tokens in order"
            dwords_VN = word_gradients(drows_TN, stream.ids_T, stream.runs_2T, ctx.words, padding_id, lazy)
        dplaces_PN = position_gradients(drows_TN, stream.cu_seqlens_D, ctx.places, offset, side)
        gradients = give_gradients(ctx, partial, slots, weight.dtype, all(ctx.needs_input_grad[4:7]))
        return None, None, dwords_VN, dplaces_PN, *gradients


def can_embed_norm(words_VN: Tensor) -> bool:
    return runs_triton(words_VN) and words_VN.shape[1] <= WIDEST


def embed_norm(
    stream: Stream,
    words_VN: Tensor,
    places_PN: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    type_bias: Tensor | None = None,
    *,
    norm: Norm,
    offset: int = 0,
    padding_id: int | None = None,
    lazy: LazyRows | None = None,
    side: SideStream | None = None,
) -> Tensor:
    """(T, N). `norm.seed` None drops nothing; where it is not, dropout comes last. offset: the row of `places_PN` for
    position 0. padding_id: a word that is never trained."""
    norm = norm._replace(drop_last=True)
    how = (norm, offset, -1 if padding_id is None else padding_id, lazy, side)
    if torch.is_grad_enabled():
        return _EmbedNorm.apply(stream, how, words_VN, places_PN, weight, norm_bias, type_bias)
    return launch_forward(
        words_VN, places_PN[offset:], weight, norm_bias, type_bias, norm, False, stream.ids_T, stream.positions_T
    ).y_TD
