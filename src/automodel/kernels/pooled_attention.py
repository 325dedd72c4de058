"""Attention of one query a document: the last block of a classifier reads nothing else.

    out_r = Σ_s drop(softmax_s(scale · q_r · k_s)) v_s          s over document r

Variable-length flash attention takes this as sequences of one query and wastes a tile of 128 on each; its backward
needs dummy queries for the documents of the tail, or it leaves their keys' gradients unwritten. Here a program takes
one document and head: forward it walks over the keys once, backward once more, and writes the gradients of keys and
values side by side, as the joined projection wants them. Documents past the last query get zeros.

Dropout bits as in `attention.py`, for query r in the place of a token.

Shapes: R queries, T tokens, H heads (as many key heads), D head dimension; CU the boundaries, (documents + 1,).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.attention import Attention, attention_keep_mask
from automodel.kernels.dispatch import runs_triton
from automodel.kernels.philox import drop_threshold

KEYS = 128  # of one step of a program
WARPS = 8


def pooled_attention_reference(
    q_RN: Tensor, kv_TW: Tensor, cu_seqlens: Tensor, how: Attention, seed: Tensor | None = None
) -> Tensor:
    """The definition: query by query. A query whose document is empty gets zeros."""
    q_RHD, (k_THD, v_THD) = q_RN.unflatten(1, (how.heads, -1)), kv_TW.unflatten(1, (2, how.heads, -1)).unbind(1)
    outputs = []
    for row, (begin, end) in zip(range(q_RN.shape[0]), pairwise(cu_seqlens.tolist())):
        scores_HS = torch.einsum("hd,shd->hs", q_RHD[row].float(), k_THD[begin:end].float()) * how.scale
        weights_HS = scores_HS.softmax(-1)
        if how.dropout > 0.0:
            assert seed is not None
            place, keys = torch.tensor([row], device=seed.device), torch.arange(begin, end, device=seed.device)
            masks = [attention_keep_mask(seed, how.site, h, place, keys, how.dropout) for h in range(how.heads)]
            weights_HS = torch.where(torch.cat(masks), weights_HS / (1.0 - how.dropout), 0.0)
        outputs.append(torch.einsum("hs,shd->hd", weights_HS, v_THD[begin:end].float()).flatten())
    return torch.stack(outputs).to(q_RN.dtype)


class _PooledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_RN: Tensor, kv_TW: Tensor, cu_seqlens: Tensor, how: Attention, seed: Tensor | None):
        from automodel.kernels.pooled_attention_triton import pooled_forward_kernel

        R = q_RN.shape[0]
        out_RN, lse_HR = torch.empty_like(q_RN), torch.empty((how.heads, R), dtype=torch.float32, device=q_RN.device)
        pooled_forward_kernel[(R, how.heads)](
            q_RN, kv_TW, out_RN, lse_HR, cu_seqlens, seed, R,
            how.scale, how.site, drop_threshold(how.dropout), 1.0 / (1.0 - how.dropout),
            H=how.heads, D=how.head_dim, BLOCK_D=how.block, BLOCK=KEYS, num_warps=WARPS,
        )  # fmt: skip
        ctx.save_for_backward(q_RN, kv_TW, out_RN, lse_HR, cu_seqlens, seed)
        ctx.how = how
        return out_RN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_RN: Tensor):
        from automodel.kernels.pooled_attention_triton import pooled_backward_kernel

        q_RN, kv_TW, out_RN, lse_HR, cu_seqlens, seed = ctx.saved_tensors
        how, R = ctx.how, q_RN.shape[0]
        dq_RN, dkv_TW = torch.empty_like(q_RN), torch.empty_like(kv_TW)
        pooled_backward_kernel[(len(cu_seqlens) - 1, how.heads)](
            q_RN, kv_TW, out_RN, dout_RN.contiguous(), lse_HR, dq_RN, dkv_TW, cu_seqlens, seed, R,
            how.scale, how.site, drop_threshold(how.dropout), 1.0 / (1.0 - how.dropout),
            H=how.heads, D=how.head_dim, BLOCK_D=how.block, BLOCK=KEYS, num_warps=WARPS,
        )  # fmt: skip
        return dq_RN, dkv_TW, None, None, None


def pooled_attention(
    q_RN: Tensor, kv_TW: Tensor, cu_seqlens: Tensor, how: Attention, seed: Tensor | None = None
) -> Tensor:
    """(R, H·D). Query r looks at document r; keys and values side by side, (T, 2·H·D) contiguous. `how.causal` and
    `how.window` are not looked at: the query sees its whole document."""
    if how.dropout > 0.0 and seed is None:
        raise ValueError("attention with dropout needs `seed`, an int64 tensor on the device of the queries")
    if not runs_triton(kv_TW):
        return pooled_attention_reference(q_RN, kv_TW, cu_seqlens, how, seed)
    seed = seed if how.dropout > 0.0 else None
    return _PooledAttention.apply(q_RN.contiguous(), kv_TW, cu_seqlens, how, seed)
