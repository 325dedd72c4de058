"""Attention of documents as one operation: against SDPA, against the same mask in steps, and what it keeps."""

from __future__ import annotations

import pytest
import torch

from automodel.kernels import cpu_attention
from automodel.kernels.cpu_attention import Documents, Reach, document_attention, document_attention_reference
from automodel.kernels.cpu_dropout import draw_kept, kept_scale

HEADS, WIDTH = 3, 8
LENGTHS = [5, 17, 1, 17, 9]


def drawn(queries: int, keys: int) -> list[torch.Tensor]:
    """As the joined projection leaves them: rows of queries, keys and values lie apart."""
    torch.manual_seed(0)
    rows = torch.randn(max(queries, keys), 3, HEADS, WIDTH)
    return [rows[:n, i].requires_grad_() for i, n in enumerate((queries, keys, keys))]


def both(documents: Documents):
    """Outputs and gradients of the operation and of its definition."""
    inputs = drawn(sum(documents.queries), sum(documents.keys))
    dout = torch.randn(sum(documents.queries), HEADS, WIDTH)
    found = []
    for function in (document_attention, document_attention_reference):
        out = function(*inputs, documents)
        found.append((out, *torch.autograd.grad(out, inputs, dout)))
    return found


CAUSAL = Reach(causal=True)


def test_a_reach_in_words_of_torch():
    assert torch.equal(CAUSAL.mask(5), torch.ones(5, 5).tril().bool())
    assert torch.equal(Reach(window=2).mask(4), torch.ones(4, 4).tril(1).triu(-1).bool())
    assert torch.equal(Reach(causal=True, window=3).mask(6), torch.ones(6, 6).tril().triu(-2).bool())


@pytest.mark.parametrize("reach", [CAUSAL, Reach(window=3), Reach(causal=True, window=3), Reach()])
def test_no_key_outside_of_the_columns_is_seen(reach):
    mask, length = reach.mask(11), 11
    for first, last in ((0, 4), (4, 8), (8, 11)):
        start, end = reach.columns(first, last, length)
        seen = mask[first:last].any(0)
        assert not seen[:start].any()
        assert not seen[end:].any()
        assert seen[start]
        assert seen[end - 1]


@pytest.mark.parametrize("short", [0, 10, 192], ids=["flash", "both ways", "products"])
@pytest.mark.parametrize("reach", [None, CAUSAL])
def test_equals_sdpa_within_each_document(monkeypatch, short, reach):
    monkeypatch.setattr(cpu_attention, "SHORT", short)
    ours, theirs = both(Documents(LENGTHS, LENGTHS, 0.4, reach=reach))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_documents_longer_than_the_real_limit():
    lengths = [cpu_attention.SHORT, cpu_attention.SHORT + 1, 400]
    ours, theirs = both(Documents(lengths, lengths, WIDTH**-0.5))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("short", [0, 192])
def test_one_query_a_document_and_documents_without_any(monkeypatch, short):
    monkeypatch.setattr(cpu_attention, "SHORT", short)
    ours, theirs = both(Documents([1, 1, 1, 0, 1], [4, 0, 7, 3, 1], 0.4))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    out, dq, dk, dv = ours
    assert not torch.cat([out[1], dq[1]]).any(), "a query without keys"
    assert not torch.cat([dk[11:14], dv[11:14]]).any(), "keys without a query"


@pytest.mark.parametrize("reach", [None, CAUSAL])
def test_drops_weights_and_passes_gradients_where_it_did_not(reach):
    p, lengths = 0.3, [17, 6]
    q, k, v = drawn(23, 23)
    dout, state = torch.randn(23, HEADS, WIDTH), torch.get_rng_state()
    out = document_attention(q, k, v, Documents(lengths, lengths, 0.4, p, reach))
    ours = torch.autograd.grad(out, (q, k, v), dout)
    torch.set_rng_state(state)
    parts = []
    for each in zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q, k, v))):
        scores = each[0] @ each[1].transpose(1, 2) * 0.4
        if reach is not None:
            scores = scores.masked_fill(~reach.mask(scores.shape[1]), float("-inf"))
        factors = draw_kept(scores.shape, p) * kept_scale(p)
        parts.append(((scores.softmax(-1) * factors) @ each[2]).transpose(0, 1))
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, (q, k, v), dout), rtol=1e-4, atol=1e-5)


def test_keeps_no_weights_of_long_documents():
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        for length in (100, 400):
            document_attention(*drawn(length, length), Documents([length], [length], 0.4))
    assert HEADS * 100**2 in sizes
    assert max(sizes) < HEADS * 400**2


def test_other_devices_and_dtypes_take_the_definition():
    inputs = [x.detach().double() for x in drawn(6, 6)]
    documents = Documents([6], [6], 0.4)
    assert torch.equal(document_attention(*inputs, documents), document_attention_reference(*inputs, documents))
