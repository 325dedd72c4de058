"""Attention whose scores saturate (Gemma 2), over a packed stream of documents.

    out_t = sum over s of softmax_s(cap(scale * q_t . k_s)) v_s,     cap(x) = c * tanh(x / c)

s as in `packed_attention.py`. No kernel of torch has the cap. On a GPU, in 16 bits, it is our own
(`kernels/attention.py`), over queries, keys and values side by side and with the boundaries on the device; elsewhere
the steps are taken one by one, document by document: exact, at the cost of keeping the scores.

Legend: H query heads, K key/value heads, T tokens, S tokens of a document, D head dimension.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel.kernels.attention import FORWARD, Attention, attention
from automodel.kernels.dispatch import runs_triton

_HALF = (torch.float16, torch.bfloat16)


@torch.compiler.disable  # blocks are compiled around it
def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, window: int | None, how: Attention
) -> Tensor:
    """(1, H, T, D) queries, (1, K, T, D) keys and values in, (1, T, H, D) out."""
    # The kernel's dropout has a seed of its own, which stock blocks do not bring along.
    if runs_triton(query) and query.dtype in _HALF and how.block in FORWARD and how.dropout == 0.0:
        how = replace(how, window=-1 if window is None else window - 1)
        qkv_TW = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (query, key, value)], dim=1)
        return attention(qkv_TW, cu_seqlens, longest, how).unflatten(1, (how.heads, how.head_dim)).unsqueeze(0)
    return capped_attention_reference(query, key, value, cu_seqlens.tolist(), window, how)


def capped_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, boundaries: list[int], window: int | None, how: Attention
) -> Tensor:
    """The definition, step by step. `boundaries` are cumulative lengths starting at 0."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    lengths = [end - start for start, end in pairwise(boundaries)]
    outputs = []
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value))):
        scores = how.softcap * torch.tanh(q @ k.transpose(2, 3) * (how.scale / how.softcap))
        position = torch.arange(q.shape[2], device=q.device)
        distance = position[:, None] - position[None, :]
        hidden = distance < 0 if how.causal else torch.zeros_like(distance, dtype=torch.bool)
        if window is not None:
            hidden = hidden | (distance.abs() >= window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
        outputs.append(F.dropout(weights, how.dropout) @ v)
    return torch.cat(outputs, dim=2).transpose(1, 2)
