"""Causal attention of the fused decoder blocks: every token, or one query a document.

Keys and values have fewer heads than queries and are not expanded: the kernels share them. On a GPU there are three
kernels. Ours (`kernels/attention.py`) is made for short documents and works on the joined product: with Llama's heads
it takes half the time of torch's variable-length flash attention on documents of 180 tokens. torch's is made for long
ones; where all of them have one length, they are an ordinary rectangle, for which cuDNN has a kernel. Elsewhere it is
torch's SDPA, document by document, which is the definition.

The last block of a classifier needs the attention of one token of each document. That token sees what stands before it
and itself. It is the document's last one, unless the document ends with the pad token, in which case stock classifiers
read the last token that is none. So each document is cut behind its pooled token; the query is then the last one of its
piece and sees all of it, without any mask that depends on positions. The rest of a document, mostly empty, is a piece
with a query that nobody reads: the backward pass of varlen attention leaves keys unwritten that no query covers.

A few queries spread over a document, which is what the labels of a language model would need, cannot be had that way: a
causal mask between unequal lengths is aligned to the ends. There only what follows attention is restricted to them.

Legend: T tokens, R pooled rows, B pieces, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from automodel.kernels.attention import WIDEST_HEAD, Attention, varlen_flash
from automodel.kernels.dispatch import runs_triton
from automodel.models.capped_attention import capped_attention_reference
from automodel.models.packed_attention import packed_attention_reference

SHORT = 1024
"""Documents up to this length, in the mean, go to our own kernel. It was measured at 40 to 500 tokens; for long ones
its tiles are small, and its backward computes scores twice."""


class Documents(NamedTuple):
    """Where the documents of a packed stream stand."""

    boundaries: Tensor
    """int32, cumulative, from 0 to T; unused slots repeat T."""
    longest: int
    """Upper bound of a document's length."""
    positions_T: Tensor


class Pieces(NamedTuple):
    """Documents cut behind their pooled token, with one query each. Even pieces end with the pooled token of a document
    slot, odd ones hold what follows it."""

    boundaries: Tensor
    """int32 (B + 1,), of the keys."""
    queries_B: Tensor
    """int64 rows of the stream."""


def cut_behind(pooled_R: Tensor, documents: Documents) -> Pieces:
    """Row r of `pooled_R` belongs to document slot r; a row outside its document (an unused slot) gives an empty
    piece."""
    starts, ends = documents.boundaries[:-1], documents.boundaries[1:]
    rows = pooled_R.shape[0]
    behind = torch.minimum(torch.maximum(pooled_R.to(starts.dtype) + 1, starts[:rows]), ends[:rows])
    cuts = torch.cat([behind, ends[rows:]])
    boundaries = torch.cat([torch.stack([starts, cuts], dim=1).flatten(), ends[-1:]])
    queries = torch.stack([cuts, ends], dim=1).flatten() - 1
    return Pieces(boundaries, queries.clamp(min=0).to(torch.int64))


def stays_joined(qkv_TW: Tensor, documents: Documents, how: Attention) -> bool:
    """Whether attention works on the joined product. The mean length is told from shapes, which the host knows."""
    slots = documents.boundaries.shape[0] - 1
    suits = how.head_dim <= WIDEST_HEAD and qkv_TW.shape[0] <= SHORT * slots
    return runs_triton(qkv_TW) and (suits or how.softcap > 0.0)  # no other kernel has a cap


def attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, how: Attention) -> Tensor:
    """(T, H·D): each token over its document up to itself."""
    boundaries, longest = documents.boundaries, documents.longest
    if q_THD.is_cuda and is_rectangle(q_THD, documents, how):
        return attend_rectangle(q_THD, k_TKD, v_TKD, longest, how)
    if q_THD.is_cuda:
        return varlen_flash(q_THD, k_TKD, v_TKD, (boundaries, boundaries), (longest, longest), how).flatten(1)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q_THD, k_TKD, v_TKD))
    window = None if how.window < 0 else how.window + 1
    if how.softcap:
        return capped_attention_reference(q, k, v, boundaries.tolist(), window, how)[0].flatten(1)
    out = packed_attention_reference(q, k, v, boundaries.tolist(), True, window, how.scale, how.dropout)
    return out[0].flatten(1)


def is_rectangle(q_THD: Tensor, documents: Documents, how: Attention) -> bool:
    """Whether every slot holds a document of the greatest length. Told from shapes: so many tokens fit no other way."""
    slots = documents.boundaries.shape[0] - 1
    return q_THD.shape[0] == slots * documents.longest and how.window < 0 and how.dropout == 0.0


def attend_rectangle(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, length: int, how: Attention) -> Tensor:
    """(T, H·D): documents of one length as a batch. Flash attention where cuDNN has no kernel."""
    q, k, v = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in (q_THD, k_TKD, v_TKD))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=how.scale, enable_gqa=True)
    return out.transpose(1, 2).reshape(q_THD.shape[0], -1)


def attend_last(
    q_BHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, pieces: Pieces, documents: Documents, how: Attention
) -> Tensor:
    """(B, H·D): one query over each piece. Empty pieces give zeros."""
    if not q_BHD.is_cuda:
        return attend_last_reference(q_BHD, k_TKD, v_TKD, pieces.boundaries.tolist(), how)
    one_each = torch.arange(q_BHD.shape[0] + 1, device=q_BHD.device, dtype=pieces.boundaries.dtype)
    # Causal, although one query at the end sees everything: with the window to the right left open, torch would fold
    # the heads of a group into rows for a single query, in a form its backward does not expect.
    longest = (1, documents.longest)
    return varlen_flash(q_BHD, k_TKD, v_TKD, (one_each, pieces.boundaries), longest, how).flatten(1)


def attend_last_reference(q_BHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, boundaries: list[int], how: Attention) -> Tensor:
    """The definition: the query of a piece stands at its end, and sees the last keys of it."""
    lengths = [end - start for start, end in pairwise(boundaries)]
    outputs = []
    for q, k, v in zip(q_BHD.split(1), k_TKD.split(lengths), v_TKD.split(lengths)):
        if k.shape[0] == 0:
            outputs.append(torch.zeros_like(q).flatten(1))
            continue
        reach = k.shape[0] if how.window < 0 else min(how.window + 1, k.shape[0])
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k[-reach:], v[-reach:]))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=how.dropout, scale=how.scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs)
