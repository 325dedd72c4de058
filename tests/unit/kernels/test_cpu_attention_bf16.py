"""Attention of documents in bf16 on the CPU: as near to fp64 as torch's own in bf16, whatever the pieces."""

from __future__ import annotations

import pytest
import torch

from automodel.kernels import cpu_attention_bf16
from automodel.kernels.cpu_attention import Documents, Reach, document_attention, document_attention_reference
from automodel.kernels.cpu_dropout import kept_scale

WIDTH = 8
LENGTHS = [5, 17, 1, 30, 9]
ERROR = 1e-2
"""Relative, of a whole tensor: inputs, weights and results are rounded to 8 bits, one after the other."""


def drawn(queries: int, keys: int, heads: int, key_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, heads, WIDTH), (keys, key_heads, WIDTH), (keys, key_heads, WIDTH))
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def apart(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float(
        torch.linalg.vector_norm(ours.detach().double() - exact.detach()) / torch.linalg.vector_norm(exact.detach())
    )


def compared(documents: Documents, heads: int = 3, key_heads: int = 3) -> None:
    inputs = drawn(sum(documents.queries), sum(documents.keys), heads, key_heads)
    out = document_attention(*inputs, documents)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = (out, *torch.autograd.grad(out, inputs, dout))
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = document_attention_reference(*wide, documents)
    theirs = (exact, *torch.autograd.grad(exact, wide, dout.double()))
    for mine, definition in zip(ours, theirs):
        assert mine.dtype == torch.bfloat16
        assert apart(mine, definition) < ERROR


@pytest.mark.parametrize("kept", [0, 10, 512], ids=["made again", "both", "kept"])
@pytest.mark.parametrize("rows", [4, 256], ids=["pieces", "whole"])
@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (4, 1)], ids=["own keys", "groups", "one head of keys"])
@pytest.mark.parametrize("reach", [None, Reach(True), Reach(True, 3), Reach(False, 4)])
def test_equals_the_definition(monkeypatch, kept, rows, heads, reach):
    monkeypatch.setattr(cpu_attention_bf16, "KEPT", kept)
    monkeypatch.setattr(cpu_attention_bf16, "ROWS", rows)
    compared(Documents(LENGTHS, LENGTHS, 0.4, reach=reach), *heads)


def test_one_query_a_document_and_documents_without_any():
    compared(Documents([1, 1, 1, 1], [4, 2, 7, 1], 0.4))
    inputs = drawn(4, 15, 3, 3)
    out = document_attention(*inputs, Documents([1, 1, 1, 0, 1], [4, 0, 7, 3, 1], 0.4))
    _, dk, dv = torch.autograd.grad(out.sum(), inputs)
    assert not out[1].any(), "a query without keys"
    assert not torch.cat([dk[11:14], dv[11:14]]).any(), "keys without a query"


@pytest.mark.parametrize("reach", [None, Reach(causal=True)])
@pytest.mark.parametrize("rows", [4, 256])
def test_drops_weights_and_passes_gradients_where_it_did_not(monkeypatch, rows, reach):
    """The same weights are dropped in both passes: the gradient of values is that of what was put out."""
    monkeypatch.setattr(cpu_attention_bf16, "ROWS", rows)
    p, lengths = 0.3, [17, 6]
    factors = []
    draw = cpu_attention_bf16.draw_kept
    monkeypatch.setattr(cpu_attention_bf16, "draw_kept", lambda *how: factors.append(draw(*how)) or factors[-1])
    inputs = drawn(23, 23, 2, 2)
    documents = Documents(lengths, lengths, 0.4, p, reach)
    out = document_attention(*inputs, documents)
    dout = torch.randn(out.shape).bfloat16()
    ours = torch.autograd.grad(out, inputs, dout)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    parts, left = [], iter(factors)
    for q, k, v in zip(*(x.transpose(0, 1).split(lengths, 1) for x in wide)):
        weights = q @ k.transpose(1, 2) * 0.4
        if reach is not None:
            weights = weights.masked_fill(~reach.mask(k.shape[1]), float("-inf"))
        weights = weights.softmax(-1)
        rows_of = []
        for piece in cpu_attention_bf16.pieces(q.shape[1], k.shape[1], documents):
            used = weights[:, piece.rows, piece.columns] * next(left).double() * kept_scale(p)
            rows_of.append(used @ v[:, piece.columns])
        parts.append(torch.cat(rows_of, 1).transpose(0, 1))
    exact = torch.cat(parts)
    assert apart(out, exact) < ERROR
    for mine, theirs in zip(ours, torch.autograd.grad(exact, wide, dout.double())):
        assert apart(mine, theirs) < ERROR


def test_keeps_no_weights_of_long_documents(monkeypatch):
    monkeypatch.setattr(cpu_attention_bf16, "KEPT", 100)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        for length in (100, 300):
            document_attention(*drawn(length, length, 3, 3), Documents([length], [length], 0.4))
    assert 3 * 100**2 in sizes
    assert max(sizes) < 3 * 300**2
