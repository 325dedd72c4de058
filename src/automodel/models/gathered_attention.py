"""Attention of some tokens to all: what context ranks do where heads cannot be traded.

Trading heads for tokens (`distributed/context_parallel.py`) needs as many heads as ranks, and equal shares. Where there
are fewer, every rank keeps its queries, all their heads, and gathers the keys and values of the others: with grouped
key heads these are a fraction of the queries. Of each document a rank then has some queries, one after the other, and
every key they may see:

    span    queries [q, q') of this rank see keys [k, k') of the stream; q' and k' belong to the same token if causal

A causal rank needs no key behind its last token, so the first ranks have less to do than the last. The backward pass
sends each gradient back to where its key is, summed over the ranks.

Legend: H query heads, K key and value heads, S tokens of this rank, T of all, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel.distributed.context_parallel import tokens_of_all
from automodel.kernels.attention import Attention, varlen_flash


@dataclass(frozen=True)
class Span:
    """Part of a document on this rank."""

    queries: tuple[int, int]
    """From and to, among this rank's tokens."""
    keys: tuple[int, int]
    """From and to, in the whole stream."""


@dataclass(frozen=True)
class Gathers:
    """How the ranks of a context group attend, for one batch."""

    group: Any
    start: int
    """The first token of this rank."""
    spans: tuple[Span, ...]
    boundaries: tuple[Tensor, Tensor] | None = None
    """Of queries and of keys (from the first span's on), int32, on the device."""

    def to(self, device: Any) -> Gathers:
        ends = [[0], [0]]
        for span in self.spans:
            ends[0].append(span.queries[1])
            ends[1].append(span.keys[1] - self.spans[0].keys[0])
        made = tuple(torch.tensor(values, dtype=torch.int32, device=device) for values in ends)
        return Gathers(self.group, self.start, self.spans, (made[0], made[1]))


def spans_of(boundaries: list[int], start: int, stop: int, causal: bool) -> tuple[Span, ...]:
    """Documents of the stream that tokens `start` to `stop` belong to. Neighbouring, so that their keys are too."""
    found = []
    for first, last in pairwise(boundaries):
        begin, end = max(first, start), min(last, stop)
        if begin < end:
            found.append(Span((begin - start, end - start), (first, end if causal else last)))
    return tuple(found)


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    how: Gathers,
    causal: bool,
    window: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """(1, H, S, D) queries and (1, K, S, D) keys and values of this rank in, (1, S, H, D) out."""
    key, value = tokens_of_all(key, how.group), tokens_of_all(value, how.group)
    half = query.dtype in (torch.float16, torch.bfloat16)
    # Flash attention aligns windows to the ends of a document, which a rank in its middle does not see.
    if query.is_cuda and half and query.shape[-1] % 8 == 0 and (causal or window is None):
        return _flash(query, key, value, how, causal, window, scale, dropout)
    outputs = []
    for span in how.spans:
        q_1HQD = query[:, :, slice(*span.queries)]
        k_1KTD, v_1KTD = (x[:, :, slice(*span.keys)] for x in (key, value))
        mask = _mask(span, how.start, causal, window, query.device)
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            q_1HQD, k_1KTD, v_1KTD, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _mask(span: Span, start: int, causal: bool, window: int | None, device: Any) -> Tensor | None:
    """Which keys a query may see; none: all."""
    if not causal and window is None:
        return None
    queries = torch.arange(*span.queries, device=device).unsqueeze(1) + start
    distance = queries - torch.arange(*span.keys, device=device)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    how: Gathers,
    causal: bool,
    window: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    assert how.boundaries is not None
    needed = slice(how.spans[0].keys[0], how.spans[-1].keys[1])
    longest = (
        max(span.queries[1] - span.queries[0] for span in how.spans),
        max(span.keys[1] - span.keys[0] for span in how.spans),
    )
    reach = -1 if window is None else window - 1
    kind = Attention(query.shape[1], key.shape[1], query.shape[3], scale, causal, reach, dropout)
    heads = (x[0].transpose(0, 1) for x in (query, key[:, :, needed], value[:, :, needed]))
    return varlen_flash(*heads, how.boundaries, longest, kind).unsqueeze(0)
