"""Rotation, head norms and the taking apart of a joined product: against transformers, and the kernels against the
references, forward and backward."""

import pytest
import torch

from automodel.kernels.rope import rope_, rope_reference, rope_table
from automodel.kernels.rope_heads import HeadNorms, Heads, rope_heads, rope_heads_reference, rope_joined

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}  # fp32
POSITIONS = torch.tensor([0, 1, 2, 3, 0, 1, 7, 30, 5])


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def table_of(angles, scaling=1.0):
    return rope_table(1.0 / 100.0 ** (torch.arange(angles) / angles), 32, scaling)


def norms_of(dim, offset=0.0):
    return HeadNorms(draw(dim, seed=5), draw(dim, seed=6), 1e-6, offset, offset == 0.0)


def check(x, heads, table, norms):
    ours = rope_heads(x * 1.0, POSITIONS, table, heads, norms)
    expected = rope_heads_reference(x, POSITIONS, table, heads, norms)
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, **TOLERANCE)
    learned = [x]
    if norms is not None:
        learned += [w for w, count in zip(norms[:2], heads[:2]) if count]
    upstream = [torch.randn(o.shape, generator=torch.Generator().manual_seed(9)) for o in ours]
    found = torch.autograd.grad(ours, learned, upstream)
    for a, b in zip(found, torch.autograd.grad(expected, learned, upstream)):
        torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("norms", [None, 0.0, 1.0], ids=["plain", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "heads", [Heads(4, 2, 8), Heads(3, 1, 16), Heads(5, 0, 8), Heads(0, 3, 8), Heads(2, 2, 24)], ids=str
)
def test_heads(path, heads, norms):
    x = draw(len(POSITIONS), (heads.queries + 2 * heads.keys) * heads.dim)
    check(x, heads, table_of(heads.dim // 2), None if norms is None else norms_of(heads.dim, norms))


@pytest.mark.parametrize("norms", [None, 0.0, 1.0], ids=["plain", "qwen3", "gemma3"])
@pytest.mark.parametrize("heads", [Heads(4, 2, 8), Heads(3, 1, 16), Heads(2, 2, 24)], ids=str)
def test_heads_side_by_side(path, heads, norms):
    """The gradient comes back in the memory of the one that was handed in."""
    x = draw(len(POSITIONS), (heads.queries + 2 * heads.keys) * heads.dim)
    table, norms = table_of(heads.dim // 2), None if norms is None else norms_of(heads.dim, norms)
    ours = rope_joined(x * 1.0, POSITIONS, table, heads, norms)
    expected = torch.cat(rope_heads_reference(x, POSITIONS, table, heads, norms), dim=1).flatten(1)
    torch.testing.assert_close(ours, expected, **TOLERANCE)
    learned = [x, *(norms[:2] if norms else ())]
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad(ours, learned, upstream.clone())
    for a, b in zip(found, torch.autograd.grad(expected, learned, upstream)):
        torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("angles", [2, 3, 6])
def test_a_part_of_each_head_turns(path, angles):
    heads = Heads(3, 2, 16)
    check(draw(len(POSITIONS), 7 * 16), heads, table_of(angles, scaling=1.3), None)


@pytest.mark.parametrize("unused", [0, 1, 2])
def test_a_result_that_nobody_reads(path, unused):
    heads = Heads(2, 1, 8)
    x = draw(len(POSITIONS), 32)
    ours, expected = (
        sum(o.square().sum() for i, o in enumerate(made) if i != unused)
        for made in (
            rope_heads(x * 1.0, POSITIONS, table_of(4), heads, norms_of(8)),
            rope_heads_reference(x, POSITIONS, table_of(4), heads, norms_of(8)),
        )
    )
    torch.testing.assert_close(torch.autograd.grad(ours, x)[0], torch.autograd.grad(expected, x)[0], **TOLERANCE)


def test_without_norms_nothing_is_copied(interpreter):
    x = draw(len(POSITIONS), 32)
    joined = x * 1.0
    q, k, v = rope_heads(joined, POSITIONS, table_of(4), Heads(2, 1, 8))
    start = joined.data_ptr()
    assert [t.data_ptr() - start for t in (q, k, v)] == [0, 2 * 8 * 4, 3 * 8 * 4]


def test_no_gradient_asked_for(path):
    x = draw(len(POSITIONS), 32)
    with torch.no_grad():
        q, _, v = rope_heads(x * 1.0, POSITIONS, table_of(4), Heads(2, 1, 8), norms_of(8))
    expected = rope_heads_reference(x, POSITIONS, table_of(4), Heads(2, 1, 8), norms_of(8))
    torch.testing.assert_close(q, expected[0].detach(), **TOLERANCE)
    torch.testing.assert_close(v, expected[2].detach(), **TOLERANCE)


@pytest.mark.parametrize(("angles", "dim"), [(4, 8), (3, 8), (6, 16)])
def test_rope_in_place(path, angles, dim):
    x, upstream = draw(len(POSITIONS), 5 * dim), torch.randn(len(POSITIONS), 5 * dim)
    table = table_of(angles)
    ours = rope_(x * 1.0, POSITIONS, table, 3, dim)
    expected = rope_reference(x, POSITIONS, table, 3, 1.0, dim)
    torch.testing.assert_close(ours, expected, **TOLERANCE)
    found = torch.autograd.grad(ours, x, upstream.clone())[0]
    torch.testing.assert_close(found, torch.autograd.grad(expected, x, upstream)[0], **TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_the_reference_is_the_stock_rotation(kind):
    """Llama turns whole heads, Phi a part of each (here half)."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3

    angles = 4 if kind == "llama" else 2
    table = table_of(angles)
    x = draw(len(POSITIONS), 32)
    q, k, _ = Heads(2, 1, 8).split(x)
    cos, sin = (torch.cat([t[POSITIONS]] * 2, dim=-1)[None] for t in table)
    stock = {"llama": llama, "phi3": phi3}[kind](q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    ours = rope_heads_reference(x, POSITIONS, table, Heads(2, 1, 8))
    for a, b in zip(ours, stock):
        torch.testing.assert_close(a, b[0].transpose(0, 1), **TOLERANCE)


def test_norms_over_heads_that_turn_in_part_are_refused():
    with pytest.raises(ValueError, match="whole heads"):
        rope_heads(torch.ones(9, 32), POSITIONS, table_of(2), Heads(2, 1, 8), norms_of(8))
