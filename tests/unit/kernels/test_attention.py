"""Packed attention over one joined tensor, against the definition with the scores in memory."""

import numpy as np
import pytest
import torch

from automodel.kernels import dispatch
from automodel.kernels.attention import (
    BACKWARD,
    GROUPED_BACKWARD,
    Attention,
    Turned,
    attention,
    attention_keep_mask,
    attention_reference,
    backward_tiles,
    can_turn,
    most_tiles,
)
from automodel.kernels.pooled_attention import pooled_attention, pooled_attention_reference
from automodel.kernels.rope import rope_reference, rope_table
from automodel.models.capped_attention import capped_attention_reference
from automodel.models.packed_attention import packed_attention_reference
from tiers import quick

CASES = {
    "plain": Attention(2, 2, 32, 0.2),
    "dropout": Attention(2, 2, 32, 0.2, dropout=0.3, site=5),
    "causal, grouped heads": Attention(4, 2, 32, 0.2, causal=True),
    "window": Attention(2, 2, 32, 0.2, window=7),
    "causal window, dropout": Attention(2, 1, 32, 0.2, causal=True, window=70, dropout=0.1),
    "wide heads": Attention(1, 1, 64, 0.125),
    "four heads in a tile": Attention(8, 2, 64, 0.125, causal=True),
    "two heads in a tile, dropout, window": Attention(4, 2, 64, 0.125, causal=True, window=70, dropout=0.1, site=2),
    "three heads, each its own tile": Attention(3, 1, 64, 0.125, causal=True),
    "four wide heads in a tile": Attention(4, 1, 128, 0.09, dropout=0.1),
    "capped": Attention(4, 2, 32, 0.2, causal=True, window=40, softcap=0.7),
    "capped, the widest heads": Attention(1, 1, 256, 0.1, causal=True, softcap=1.5),
}


def stream(how, lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = (how.heads + 2 * how.key_heads) * how.head_dim
    qkv = torch.randn(sum(lengths), width, generator=generator)
    return qkv.requires_grad_(), torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    "case",
    quick(CASES, "plain", "window", "capped, the widest heads", "two heads in a tile, dropout, window", "wide heads"),
)
def test_kernels_equal_the_definition(case):
    how, lengths = CASES[case], [130, 1, 64, 0, 37]
    qkv, boundaries = stream(how, lengths)
    twin = qkv.detach().clone().requires_grad_()
    seed = torch.tensor([77])
    upstream = torch.randn(sum(lengths), how.heads * how.head_dim, generator=torch.Generator().manual_seed(1))
    ours = attention(qkv, boundaries, 130, how, seed)
    theirs = attention_reference(twin, boundaries, how, seed)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    ours.backward(upstream)
    theirs.backward(upstream)
    torch.testing.assert_close(qkv.grad, twin.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("case", quick([case for case in CASES if "in a tile" in case], "four heads in a tile"))
def test_so_they_do_with_the_tiles_of_other_gpus(case, monkeypatch):
    monkeypatch.setattr(dispatch, "stand_in_capability", 80)
    assert backward_tiles(torch.device("cpu")) == (BACKWARD, GROUPED_BACKWARD)
    test_kernels_equal_the_definition(case)


def listed(lengths, block, causal, of_keys):
    """Tiles (begin, length, first) in the order in which programs take them."""
    begins = np.cumsum([0, *lengths])
    of_document = [[(int(b), n, first) for first in range(0, n, block)] for b, n in zip(begins, lengths)]
    if not causal:
        return [tile for tiles in of_document for tile in tiles]
    of_document = [tiles if of_keys else tiles[::-1] for tiles in of_document]
    most = max(map(len, of_document))
    return [tiles[rank] for rank in range(most) for tiles in of_document if rank < len(tiles)]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "lengths", [[130, 1, 64, 0, 37], [16], [2100, 5], [*range(3, 83)], [0, 0, 9]], ids=lambda lengths: str(len(lengths))
)
def test_tiles_are_listed_once_those_with_the_most_to_do_first(causal, lengths):
    """More documents than are looked at together, more tiles, and empty documents."""
    from automodel.kernels.attention_triton import attention_delta_kernel

    T, documents, blocks = sum(lengths), len(lengths), (64, 16)  # of keys, of queries
    counts = [most_tiles(T, documents, block) for block in blocks]
    tiles = torch.full((3 * sum(counts),), -7, dtype=torch.int32)
    boundaries = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    out, delta = torch.randn(T, 16), torch.full((1, T), float("nan"))
    attention_delta_kernel[(2 * (documents + 1) + -(-T // 64),)](
        out, out, delta, boundaries, tiles, T, documents, *counts,
        H=1, D=16, BLOCK_D=16, ROWS=64, CAUSAL=causal, BLOCK_M=blocks[1], BLOCK_N=blocks[0], num_warps=4,
    )  # fmt: skip
    torch.testing.assert_close(delta[0], out.square().sum(1))
    for part, count, block, of_keys in zip(tiles.split([3 * n for n in counts]), counts, blocks, (True, False)):
        expected, found = listed(lengths, block, causal, of_keys), part.view(3, count).t().tolist()
        assert [tuple(tile) for tile in found[: len(expected)]] == expected
        assert all(length == 0 for _, length, _ in found[len(expected) :])


def low_scores(how, lengths):
    """A stream whose every score is near -100: e^100 is more than fp32 holds."""
    qkv, boundaries = stream(how, lengths)
    heads = qkv.detach().mul(0.1).unflatten(1, (-1, how.head_dim))
    size = (100 / how.scale) ** 0.5
    heads[:, : how.heads, 0] = size
    heads[:, how.heads : how.heads + how.key_heads, 0] = -size
    return heads.flatten(1).requires_grad_(), boundaries


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    "case", quick(["plain", "dropout", "window", "causal, grouped heads", "four heads in a tile"], "plain", "window")
)
def test_keys_past_the_end_of_a_document_add_nothing_where_all_scores_are_low(case):
    how, lengths = CASES[case], [130, 1, 37]
    qkv, boundaries = low_scores(how, lengths)
    twin, seed = qkv.detach().clone().requires_grad_(), torch.tensor([77])
    attention(qkv, boundaries, 130, how, seed).sum().backward()
    attention_reference(twin, boundaries, how, seed).sum().backward()
    torch.testing.assert_close(qkv.grad, twin.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("interpreter")
def test_so_for_the_pooled_token():
    how, lengths = CASES["plain"], [130, 1, 37]
    qkv, boundaries = low_scores(how, lengths)
    width = how.heads * how.head_dim
    q, kv = qkv[: len(lengths), :width], qkv[:, width:]
    ours = [x.detach().clone().requires_grad_() for x in (q, kv)]
    theirs = [x.detach().clone().requires_grad_() for x in (q, kv)]
    pooled_attention(*ours, boundaries, how).sum().backward()
    pooled_attention_reference(*theirs, boundaries, how).sum().backward()
    for mine, truth in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, truth.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", [c for c, how in CASES.items() if how.dropout == 0.0])
def test_the_definition_is_sdpa_within_each_document(case):
    how, lengths = CASES[case], [13, 1, 22]
    qkv, boundaries = stream(how, lengths)
    heads = qkv.unflatten(1, (-1, how.head_dim)).split([how.heads, how.key_heads, how.key_heads], dim=1)
    window = None if how.window < 0 else how.window + 1
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in heads)
    if how.softcap:
        theirs = capped_attention_reference(q, k, v, boundaries.tolist(), window, how)
    else:
        theirs = packed_attention_reference(q, k, v, boundaries.tolist(), how.causal, window, how.scale, 0.0)
    ours = attention_reference(qkv, boundaries, how)
    torch.testing.assert_close(ours, theirs[0].flatten(1), rtol=1e-5, atol=1e-5)


def test_masks_keep_the_right_share_and_differ_by_head_row_site_and_seed():
    rows = torch.arange(300)
    masks = [
        attention_keep_mask(torch.tensor([seed]), site, head, rows, rows, 0.1)
        for seed, site, head in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))
    ]
    for mask in masks:
        assert abs(float(mask.float().mean()) - 0.9) < 0.004  # four standard deviations of 90,000 draws
        assert float(mask.float().mean(0).std()) == pytest.approx((0.09 / 300) ** 0.5, rel=0.2)
        assert float(mask.float().mean(1).std()) == pytest.approx((0.09 / 300) ** 0.5, rel=0.2)
    for other in masks[1:]:
        agree = float((masks[0] == other).float().mean())
        assert agree == pytest.approx(0.9**2 + 0.1**2, abs=0.006)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_one_query_a_document_equals_the_definition(dropout):
    """Three queries; the documents after them, an empty one among them, are a tail: zero gradients, not garbage."""
    how, lengths = Attention(2, 2, 32, 0.2, dropout=dropout, site=3), [70, 1, 130, 9, 0]
    boundaries = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 64, generator=generator, requires_grad=True)
    kv = torch.randn(sum(lengths), 128, generator=generator, requires_grad=True)
    twins = [t.detach().clone().requires_grad_() for t in (q, kv)]
    upstream, seed = torch.randn(3, 64, generator=generator), torch.tensor([5])
    ours = pooled_attention(q, kv, boundaries, how, seed)
    theirs = pooled_attention_reference(*twins, boundaries, how, seed)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    ours.backward(upstream)
    theirs.backward(upstream)
    for mine, other in zip((q, kv), twins):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-5)
    assert kv.grad[201:].abs().max() == 0.0


def test_one_query_a_document_is_the_matching_row_of_full_attention():
    how, lengths = Attention(2, 2, 32, 0.2), [7, 12]
    qkv, boundaries = stream(how, lengths)
    full = attention_reference(qkv, boundaries, how)
    rows = boundaries[:-1].long()
    ours = pooled_attention_reference(qkv[rows, :64], qkv[:, 64:], boundaries, how)
    torch.testing.assert_close(ours, full[rows], rtol=1e-5, atol=1e-5)


def test_a_query_of_an_empty_document_gets_zeros():
    how = Attention(1, 1, 32, 0.2)
    out = pooled_attention_reference(torch.randn(2, 32), torch.randn(4, 64), torch.tensor([0, 4, 4]), how)
    assert out[1].abs().max() == 0.0


TURNED = ["plain", "causal, grouped heads", "causal window, dropout", "wide heads"]
TURNED += ["four heads in a tile", "two heads in a tile, dropout, window", "four wide heads in a tile"]


@pytest.mark.parametrize("case", quick(TURNED, "plain", "causal, grouped heads", "four heads in a tile"))
def test_rotated_on_the_way(path, case):
    """Queries and keys are turned first, and their gradients turned back, as by two operations."""
    how, lengths = CASES[case], [70, 1, 64, 0, 37]
    qkv, boundaries = stream(how, lengths)
    twin = qkv.detach().clone().requires_grad_()
    seed = torch.tensor([77])
    positions = torch.cat([torch.arange(n) for n in lengths])
    table = rope_table(10000.0 ** -(torch.arange(how.head_dim // 2) / (how.head_dim // 2)), 70)
    assert can_turn(table, how)
    ours = attention(qkv * 1.0, boundaries, 70, how, seed, Turned(positions, table))
    turned = rope_reference(twin, positions, table, how.heads + how.key_heads, head_dim=how.head_dim)
    theirs = attention_reference(turned, boundaries, how, seed)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    ours.backward(upstream)
    theirs.backward(upstream)
    torch.testing.assert_close(qkv.grad, twin.grad, rtol=1e-4, atol=2e-5)


def test_only_whole_heads_that_fill_a_tile_can_turn_inside():
    assert not can_turn(torch.zeros(2, 10, 12), Attention(2, 2, 32, 0.2))
    assert not can_turn(torch.zeros(2, 10, 20), Attention(2, 2, 40, 0.2))
