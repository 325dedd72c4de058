"""Attention within the documents of a packed stream, on the CPU in bf16, forward and backward.

    S = scale · Q Kᵀ        P = softmax(S)        O = drop(P) V
    dV = drop(P)ᵀ dO        dP = drop(dO Vᵀ)      dS = P · (dP − Σ P dP)      dQ = scale · dS K      dK = scale · dSᵀ Q

Products are made in bf16, scores are turned into weights in fp32. torch's flash attention is no choice here: its
backward pass in bf16 takes 37 to 80 ms a layer for 16 documents of 115 tokens, these products 3.6 ms (two cores of a
Zen 5; forward 2.2 ms; in fp32 4.6 and 2.5).

The queries of a document are taken `ROWS` at a time: causal queries need no scores behind their own place, and scores
of a long document never are in memory at once. The weights of documents up to `KEPT` keys are kept for the backward
pass; those of longer ones are made again there, where dropout has not drawn any of them.

Where there are fewer heads of keys than of queries, the queries of a group are further rows of the same product.

Legend: H heads of queries, K of keys, G = H / K; L and S queries and keys of one document, D head dimension; R rows of
queries taken at once, C keys that these may see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from automodel.kernels.cpu_attention import Documents, Inputs, Kept
from automodel.kernels.cpu_dropout import draw_kept, kept_scale

ROWS = 256
KEPT = 512


class Piece(NamedTuple):
    """Rows of queries of one document, and the keys that they may see."""

    rows: slice
    columns: slice
    mask_RC: Tensor | None


def pieces(queries: int, keys: int, documents: Documents) -> Iterator[Piece]:
    for first in range(0, queries, ROWS):
        last = min(first + ROWS, queries)
        if documents.reach is None:
            yield Piece(slice(first, last), slice(0, keys), None)
        else:
            start, end = documents.reach.columns(first, last, keys)
            yield Piece(slice(first, last), slice(start, end), documents.reach.mask(keys)[first:last, start:end])


def _grouped(x_HLD: Tensor, heads: int, rows: slice) -> Tensor:
    """(K, G·R, D): rows of all query heads that share a head of keys, one head below the other."""
    if x_HLD.shape[0] == heads:
        return x_HLD[:, rows]
    return x_HLD[:, rows].unflatten(0, (heads, -1)).flatten(1, 2)


def _put(place_HLD: Tensor, rows: slice, x_KRD: Tensor) -> None:
    """The way back from `_grouped`."""
    place = place_HLD[:, rows]
    place.copy_(x_KRD.view(place.shape))


def _scores(q_KRD: Tensor, k_KCD: Tensor, scale: float, mask_RC: Tensor | None) -> Tensor:
    """In fp32."""
    scores = torch.bmm(q_KRD, k_KCD.transpose(1, 2)).float().mul_(scale)
    if mask_RC is not None:
        by_group = scores.view(-1, *mask_RC.shape)
        by_group.masked_fill_(~mask_RC, -torch.inf)
    return scores


def _factors(like: Tensor, p: float) -> Tensor | None:
    """What weights are multiplied with, in fp32; drawn with one number for each of them, whatever their dtype."""
    return draw_kept(like.shape, p) if p > 0.0 else None


def _dropped(weights: Tensor, kept: Tensor | None, p: float) -> Tensor:
    """In bf16."""
    return (weights if kept is None else (weights * kept).mul_(kept_scale(p))).to(torch.bfloat16)


def attend(inputs: Inputs, documents: Documents, out_QHD: Tensor) -> list[Kept]:
    """Writes the outputs, and returns what `attend_backward` wants to see again: an entry for each piece."""
    found, p = [], documents.dropout
    for q, out, k, v in documents.cut([inputs[0], out_QHD], inputs[1:]):
        heads, keys = k.shape[:2]
        for rows, columns, mask in pieces(q.shape[1], keys, documents):
            scores = _scores(_grouped(q, heads, rows), k[:, columns], documents.scale, mask)
            weights = torch.softmax(scores, -1)
            kept = _factors(weights, p)
            used = _dropped(weights, kept, p)
            _put(out, rows, torch.bmm(used, v[:, columns]))
            if kept is not None:
                found.append(Kept(weights.to(torch.bfloat16), kept.to(torch.bfloat16)))
            else:
                found.append(Kept(used if keys <= KEPT else None))
    return found


def attend_backward(
    dout_QHD: Tensor, inputs: Inputs, documents: Documents, found: Sequence[Kept], into: Inputs
) -> None:
    """Writes the gradients of queries, keys and values `into` three tensors of the shapes of `inputs`."""
    scale, p = documents.scale, documents.dropout
    left = iter(found)
    for q, dq, dout, k, v, dk, dv in documents.cut([inputs[0], into[0], dout_QHD], [*inputs[1:], *into[1:]]):
        heads, keys = k.shape[:2]
        cut = list(pieces(q.shape[1], keys, documents))
        sums = None if len(cut) == 1 else (torch.zeros(k.shape), torch.zeros(v.shape))
        for rows, columns, mask in cut:
            made = next(left)
            q_KRD, dout_KRD = _grouped(q, heads, rows), _grouped(dout, heads, rows)
            k_KCD, v_KCD = k[:, columns], v[:, columns]
            if made.weights_HLS is None:
                weights = torch.softmax(_scores(q_KRD, k_KCD, scale, mask), -1)
                used = weights.to(torch.bfloat16)
            else:
                weights = made.weights_HLS.float()
                kept = made.factors_HLS
                used = made.weights_HLS if kept is None else _dropped(weights, kept, p)
            dv_KCD = torch.bmm(used.transpose(1, 2), dout_KRD)
            dweights = torch.bmm(dout_KRD, v_KCD.transpose(1, 2)).float()
            if made.factors_HLS is not None:
                dweights.mul_(made.factors_HLS).mul_(kept_scale(p))
            dscores = torch._softmax_backward_data(dweights, weights, -1, torch.float32)
            dscores = dscores.mul_(scale).to(torch.bfloat16)
            _put(dq, rows, torch.bmm(dscores, k_KCD))
            dk_KCD = torch.bmm(dscores.transpose(1, 2), q_KRD)
            if sums is None:  # one piece, whose columns are all keys
                dk.copy_(dk_KCD)
                dv.copy_(dv_KCD)
            else:
                sums[0][:, columns].add_(dk_KCD)
                sums[1][:, columns].add_(dv_KCD)
        if sums is not None:
            dk.copy_(sums[0])
            dv.copy_(sums[1])
