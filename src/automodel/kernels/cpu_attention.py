"""Attention within the documents of a packed stream, on the CPU, forward and backward: fp32 here, bf16 in
`cpu_attention_bf16.py`.

    out_t = Σ_s drop(softmax_s(scale · q_t · k_s)) v_s        s over the document of t

torch's SDPA, called for one document after the other, is a dozen nodes of autograd for each of them, and tensors that
are cut apart and joined again four times a layer: a fifth of attention's time where documents have a hundred tokens,
and on one thread alone. Here the documents of a layer are one node, results are written where they belong, and each
document takes the cheaper of two ways:

- up to `SHORT` tokens, two batched products and a softmax whose weights are kept. With weights at hand the backward
  pass is four products, while flash attention computes scores and exponentials again. One buffer of scores serves all
  documents and stays in the cache.
- above that, torch's flash attention: faster there, and weights would take more memory than the rest of the layer.

For 1,024 tokens with 12 heads of 32, forward and backward, on one thread of an Ice Lake: documents of 64 tokens 7.1
against 9.9 ms, of 128 10.3 against 11.9, of 192 13.1 against 13.4, of 256 20.8 against 18.4.

With dropout (`cpu_dropout.py`), or where a query may not look everywhere, it is always the products. Queries need not
be as many as keys: the last block of a classifier has one for each document. A query without keys gets zeros. In bf16
there may be fewer heads of keys and values than of queries, each for a group of neighbouring ones.

Legend: T keys of the stream, Q its queries, H heads, D head dimension; L and S queries and keys of one document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.cpu_dropout import draw_kept, kept_scale

SHORT = 192  # keys

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Reach(NamedTuple):
    """Which keys a query may look at, in a document with as many queries as keys."""

    causal: bool = False
    """None that come later."""
    window: int | None = None
    """Only keys that are fewer tokens away; None: any."""

    def mask(self, length: int) -> Tensor:
        """(length, length), true where a query (row) may look at a key (column)."""
        return _mask(length, self.causal, self.window)

    def columns(self, first: int, last: int, length: int) -> tuple[int, int]:
        """The first key that a query of the rows `first` to `last` may look at, and the one behind the last."""
        reach = length if self.window is None else self.window
        return max(0, first - reach + 1), last if self.causal else min(length, last + reach - 1)


@lru_cache(maxsize=32)
def _mask(length: int, causal: bool, window: int | None) -> Tensor:
    position = torch.arange(length)
    distance = position[:, None] - position[None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


Inputs = tuple[Tensor, Tensor, Tensor]
"""Queries (Q, H, D), keys and values (T, H, D)."""


class Documents(NamedTuple):
    """Which rows of the stream belong together, and how they attend to each other."""

    queries: list[int]
    """Of each document."""
    keys: list[int]
    """Of each document."""
    scale: float
    dropout: float = 0.0
    reach: Reach | None = None
    """None: every query sees every key of its document."""

    def mask_of(self, length: int) -> Tensor | None:
        return None if self.reach is None else self.reach.mask(length)

    def keeps_weights(self, keys: int) -> bool:
        return keys <= SHORT or self.dropout > 0.0 or self.reach is not None

    def cut(self, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Views (H, L, D) and (H, S, D) of every document that has both."""
        views = [x.transpose(0, 1).split(self.queries, 1) for x in of_queries]
        views += [x.transpose(0, 1).split(self.keys, 1) for x in of_keys]
        return (found for found, q, k in zip(zip(*views), self.queries, self.keys) if q and k)

    def place(self, like: Tensor) -> Tensor:
        """Memory for results: they fill it, or it is zero where there is nothing to attend to."""
        return like.new_empty(like.shape) if all(self.queries) and all(self.keys) else like.new_zeros(like.shape)


class Kept(NamedTuple):
    """What the backward pass reads of one document: weights and factors that dropped some, or what flash gives back."""

    weights_HLS: Tensor | None
    factors_HLS: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None


class _Scratch:
    """One buffer for the scores of every document, one for its rows."""

    def __init__(self, documents: Documents, like: Tensor):
        _, heads, head_dim = like.shape
        pairs = [(q, k) for q, k in zip(documents.queries, documents.keys) if documents.keeps_weights(k)]
        self.square = like.new_empty(heads * max((q * k for q, k in pairs), default=0))
        self.tall = like.new_empty(heads * head_dim * max((max(pair) for pair in pairs), default=0))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        heads, rows, columns = q.shape[0], q.shape[1], k.shape[1]
        return self.square.as_strided((heads, rows, columns), (rows * columns, columns, 1))

    def like(self, x: Tensor) -> Tensor:
        return self.tall.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))


def document_attention_reference(q_QHD: Tensor, k_THD: Tensor, v_THD: Tensor, documents: Documents) -> Tensor:
    """The definition: SDPA within each document, which draws its own random numbers."""
    grouped = q_QHD.shape[1] != k_THD.shape[1]
    nobody = q_QHD.new_zeros((1, *q_QHD.shape[1:]))
    outputs = []
    cuts = (x.split(n) for x, n in zip((q_QHD, k_THD, v_THD), (documents.queries, documents.keys, documents.keys)))
    for q, k, v in zip(*cuts):
        if len(q) == 0 or len(k) == 0:
            outputs.append(nobody.expand(len(q), -1, -1))
            continue
        heads = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            *heads,
            attn_mask=documents.mask_of(len(k)),
            dropout_p=documents.dropout,
            scale=documents.scale,
            enable_gqa=grouped,
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def attend(inputs: Inputs, documents: Documents, out_QHD: Tensor) -> list[Kept]:
    """Writes the outputs, and returns what `attend_backward` wants to see again."""
    if inputs[0].dtype == torch.bfloat16:
        from automodel.kernels import cpu_attention_bf16

        return cpu_attention_bf16.attend(inputs, documents, out_QHD)
    scale, p = documents.scale, documents.dropout
    scratch, found = _Scratch(documents, inputs[0]), []
    for q, out, k, v in documents.cut([inputs[0], out_QHD], inputs[1:]):
        if not documents.keeps_weights(k.shape[1]):
            result, lse = _flash(q[None], k[None], v[None], 0.0, False, scale=scale)
            out.copy_(result[0])
            found.append(Kept(None, None, result, lse))
            continue
        scores = scratch.scores(q, k)
        torch.baddbmm(scores, q, k.transpose(1, 2), beta=0, alpha=scale, out=scores)
        mask = documents.mask_of(k.shape[1])
        if mask is not None:
            scores.masked_fill_(~mask, -torch.inf)
        weights, factors = torch.softmax(scores, -1), None
        used = weights
        if p > 0.0:
            factors = draw_kept(weights.shape, p, weights.dtype).mul_(kept_scale(p))
            used = torch.mul(weights, factors, out=scores)
        out.copy_(torch.bmm(used, v, out=scratch.like(q)))
        found.append(Kept(weights, factors))
    return found


def attend_backward(
    dout_QHD: Tensor, inputs: Inputs, documents: Documents, found: Sequence[Kept], into: Inputs
) -> None:
    """Writes the gradients of queries, keys and values `into` three tensors of the shapes of `inputs`."""
    if inputs[0].dtype == torch.bfloat16:
        from automodel.kernels import cpu_attention_bf16

        cpu_attention_bf16.attend_backward(dout_QHD, inputs, documents, found, into)
        return
    scale, scratch = documents.scale, _Scratch(documents, inputs[0])
    cuts = documents.cut([inputs[0], into[0], dout_QHD], [*inputs[1:], *into[1:]])
    for (q, dq, dout, k, v, dk, dv), (weights, factors, out, lse) in zip(cuts, found):
        if weights is None:
            heads = (x[None] for x in (dout, q, k, v))
            gradients = _flash_backward(*heads, out, lse, 0.0, False, scale=scale)
            for place, gradient in zip((dq, dk, dv), gradients):
                place.copy_(gradient[0])
            continue
        scores, rows_of_k = scratch.scores(q, k), scratch.like(k)
        used = weights if factors is None else torch.mul(weights, factors, out=scores)
        dv.copy_(torch.bmm(used.transpose(1, 2), dout, out=rows_of_k))
        torch.bmm(dout, v.transpose(1, 2), out=scores)
        if factors is not None:
            scores.mul_(factors)
        torch._softmax_backward_data(scores, weights, -1, weights.dtype, grad_input=scores)
        rows_of_q = scratch.like(q)
        dq.copy_(torch.baddbmm(rows_of_q, scores, k, beta=0, alpha=scale, out=rows_of_q))
        dk.copy_(torch.baddbmm(rows_of_k, scores.transpose(1, 2), q, beta=0, alpha=scale, out=rows_of_k))


def flattened(found: Sequence[Kept]) -> list[Tensor | None]:
    """As autograd takes it, which frees what it keeps while the backward pass goes on."""
    return [tensor for kept in found for tensor in kept]


def gathered(tensors: Sequence[Tensor | None]) -> list[Kept]:
    size = len(Kept._fields)
    return [Kept(*tensors[i : i + size]) for i in range(0, len(tensors), size)]


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_QHD: Tensor, k_THD: Tensor, v_THD: Tensor, documents: Documents) -> Tensor:
        out_QHD = documents.place(q_QHD)
        found = attend((q_QHD, k_THD, v_THD), documents, out_QHD)
        ctx.save_for_backward(q_QHD, k_THD, v_THD, *flattened(found))
        ctx.documents = documents
        return out_QHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_QHD: Tensor):
        q, k, v, *kept = ctx.saved_tensors
        into = ctx.documents.place(q), ctx.documents.place(k), ctx.documents.place(v)
        attend_backward(dout_QHD, (q, k, v), ctx.documents, gathered(kept), into)
        return *into, None


def document_attention(q_QHD: Tensor, k_THD: Tensor, v_THD: Tensor, documents: Documents) -> Tensor:
    """(Q, H, D) from queries, keys and values; in fp32 of as many heads."""
    if q_QHD.device.type != "cpu" or q_QHD.dtype not in (torch.float32, torch.bfloat16):
        return document_attention_reference(q_QHD, k_THD, v_THD, documents)
    return _DocumentAttention.apply(q_QHD, k_THD, v_THD, documents)
