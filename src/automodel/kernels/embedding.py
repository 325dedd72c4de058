"""Embedding tables whose gradients are gathered, not scattered.

    forward     rows_t = W[id_t]
    backward    dW[v]  = Σ over t with id_t = v of drows_t           (0 for the padding id, and where no token is v)

torch sorts the ids on the device in every backward pass: twenty launches, 0.25 ms at 8k tokens. Both tables of a packed
batch are known beforehand, though. Word ids are sorted once on the host, where the batch is made (`runs_2T`: places in
sorted order, and the length of the run of equal ids that starts there, else 0); each program adds up one run. Positions
need no sorting: position p of every document stands at its start + p. Sums are in fp32, in a fixed order, and rounded
once.

Shapes: T tokens, V rows of the table, N width, D documents.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.dispatch import power_of_two_above, runs_triton
from automodel.kernels.lazy_rows import LazyRows, RowGradients
from automodel.kernels.side_stream import SideStream, gradients_by

LONG_RUN = 8  # tokens that occur more often are added up by several programs
BLOCK = 128  # columns of one program
DOCUMENTS = 8  # documents looked at at once


def embedding_reference(ids_T: Tensor, weight_VN: Tensor, padding_id: int | None = None) -> Tensor:
    return F.embedding(ids_T, weight_VN, padding_id)


def _block(width: int) -> int:
    return min(BLOCK, power_of_two_above(width))


class _WordEmbedding(torch.autograd.Function):
    """Where the table has a gradient already (of a tied head, or of the micro-batches before), rows are added to it in
    place, as autograd would add a whole table, mostly of zeros."""

    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, weight_VN: Tensor, runs_2T: Tensor, padding_id: int) -> Tensor:
        ctx.save_for_backward(ids_T, runs_2T)
        ctx.weight, ctx.padding_id = weight_VN, padding_id
        return weight_VN.index_select(0, ids_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows_TN: Tensor):
        return None, word_gradients(drows_TN, *ctx.saved_tensors, ctx.weight, ctx.padding_id), None, None


class _LazyWordEmbedding(torch.autograd.Function):
    """As `_WordEmbedding`, for a table whose rows are updated when they are needed; its gradient goes to `lazy`."""

    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, weight_VN: Tensor, runs_2T: Tensor, padding_id: int, lazy: LazyRows) -> Tensor:
        ctx.save_for_backward(ids_T, runs_2T)
        ctx.weight, ctx.padding_id, ctx.lazy = weight_VN, padding_id, lazy
        lazy.catch_up(ids_T, runs_2T)
        return weight_VN.index_select(0, ids_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows_TN: Tensor):
        word_gradients(drows_TN, *ctx.saved_tensors, ctx.weight, ctx.padding_id, ctx.lazy)
        return None, None, None, None, None


def word_gradients(
    drows_TN: Tensor, ids_T: Tensor, runs_2T: Tensor, weight_VN: Tensor, padding_id: int, lazy: LazyRows | None = None
) -> Tensor | None:
    """The gradient of a word table from those of the rows that were read: into `lazy`, into the table's gradient where
    there is one already, or as a new table."""
    drows_TN = drows_TN.contiguous()
    if lazy is not None:
        rows_TN = torch.empty_like(drows_TN)
        _add_up_runs(drows_TN, runs_2T, ids_T, rows_TN, padding_id, by_run=True)
        lazy.gradients = RowGradients(rows_TN, ids_T, runs_2T, padding_id)
        return None
    there_VN = weight_VN.grad if weight_VN.is_leaf else None
    if there_VN is not None and there_VN.is_contiguous():
        _add_up_runs(drows_TN, runs_2T, ids_T, there_VN, padding_id, by_run=False, add=True)
        return None
    dweight_VN = torch.zeros(weight_VN.shape, dtype=drows_TN.dtype, device=drows_TN.device)
    _add_up_runs(drows_TN, runs_2T, ids_T, dweight_VN, padding_id, by_run=False)
    return dweight_VN


def _add_up_runs(
    drows_TN: Tensor, runs_2T: Tensor, ids_T: Tensor, out: Tensor, padding_id: int, *, by_run: bool, add: bool = False
) -> None:
    """Sums of the gradients of equal tokens, into the row of the token or, `by_run`, of the place its run starts at;
    `add`: to what is there."""
    if not runs_triton(drows_TN):
        for start in (runs_2T[1] > 0).nonzero().squeeze(1).tolist():
            places = runs_2T[0, start : start + int(runs_2T[1, start])].long()
            token = int(ids_T[places[0]])
            if token != padding_id:
                row = out[start if by_run else token]
                row.copy_(drows_TN[places].float().sum(0) + (row.float() if add else 0.0))
        return
    from automodel.kernels.embedding_triton import word_backward_kernel

    (T, N), part = drows_TN.shape, _block(drows_TN.shape[1])
    word_backward_kernel[(T, -(-N // part))](
        drows_TN, runs_2T, ids_T, out, T, padding_id,
        N=N, BLOCK_N=power_of_two_above(N), LONG=LONG_RUN, PART=part, BY_RUN=by_run, ADD=add, num_warps=4,
    )  # fmt: skip


class _PositionEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        positions_T: Tensor,
        weight_VN: Tensor,
        cu_seqlens_D: Tensor,
        offset: int,
        side: SideStream | None,
    ) -> Tensor:
        ctx.save_for_backward(cu_seqlens_D)
        ctx.offset, ctx.weight, ctx.side = offset, weight_VN, side
        return weight_VN.index_select(0, positions_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows_TN: Tensor):
        (cu_seqlens_D,) = ctx.saved_tensors
        return None, position_gradients(drows_TN, cu_seqlens_D, ctx.weight, ctx.offset, ctx.side), None, None, None


def position_gradients(
    drows_TN: Tensor, cu_seqlens_D: Tensor, weight_VN: Tensor, offset: int, side: SideStream | None
) -> Tensor | None:
    """The gradient of a table of positions; None where `side` takes it."""
    drows_TN = drows_TN.contiguous()
    return gradients_by(
        side, [weight_VN], lambda: [_sum_by_position(drows_TN, cu_seqlens_D, weight_VN.shape, offset)], drows_TN
    )[0]


def _sum_by_position(drows_TN: Tensor, cu_seqlens_D: Tensor, shape: torch.Size, offset: int) -> Tensor:
    from automodel.kernels.embedding_triton import position_backward_kernel

    dweight_VN = torch.empty(shape, dtype=drows_TN.dtype, device=drows_TN.device)
    V, N = shape
    position_backward_kernel[(V,)](
        drows_TN, cu_seqlens_D, dweight_VN, len(cu_seqlens_D) - 1, offset,
        N=N, BLOCK_N=power_of_two_above(N), AT_ONCE=DOCUMENTS, num_warps=4,
    )  # fmt: skip
    return dweight_VN


def word_embedding(
    ids_T: Tensor,
    weight_VN: Tensor,
    runs_2T: Tensor | None,
    padding_id: int | None = None,
    lazy: LazyRows | None = None,
) -> Tensor:
    """Rows of the table. `runs_2T`: int32, as `PackedBatch.token_runs_2T`; without it torch's own backward. `lazy`: the
    optimizer's rows, where the table is updated row by row; the gradient then goes there and not into `.grad`."""
    if lazy is not None:
        assert runs_2T is not None, "rows that are updated when needed must be known"
        return _LazyWordEmbedding.apply(ids_T, weight_VN, runs_2T, -1 if padding_id is None else padding_id, lazy)
    if runs_2T is None or not runs_triton(weight_VN):
        return embedding_reference(ids_T, weight_VN, padding_id)
    return _WordEmbedding.apply(ids_T, weight_VN, runs_2T, -1 if padding_id is None else padding_id)


def position_embedding(
    positions_T: Tensor,
    weight_VN: Tensor,
    cu_seqlens_D: Tensor,
    offset: int = 0,
    padding_id: int | None = None,
    side: SideStream | None = None,
) -> Tensor:
    """Rows of the table for positions that count up from `offset` in every document of `cu_seqlens_D`, (D + 1,).
    `side`: where the table's gradient is summed up."""
    if not runs_triton(weight_VN):
        return embedding_reference(positions_T, weight_VN, padding_id)
    return _PositionEmbedding.apply(positions_T, weight_VN, cu_seqlens_D, offset, side)
