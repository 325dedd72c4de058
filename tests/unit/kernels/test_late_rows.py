"""A word table whose update waits until its rows were read: the losses and weights of plain AdamW."""

import pytest
import torch
import torch.nn.functional as F

from automodel.kernels.embedding import word_embedding
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.linear_cross_entropy import linear_cross_entropy

WORDS, WIDE, TOKENS = 23, 16, 9


def batch(step):
    ids = torch.randint(0, WORDS, (TOKENS,), generator=torch.Generator().manual_seed(step))
    order = ids.argsort(stable=True)
    firsts = torch.cat([torch.tensor([True]), ids[order][1:] != ids[order][:-1]])
    starts = firsts.nonzero().squeeze(1)
    lengths = torch.zeros(TOKENS, dtype=torch.int64)
    lengths[starts] = torch.cat([starts[1:], torch.tensor([TOKENS])]) - starts
    return ids, torch.stack([order, lengths]).int(), ids.roll(-1)


def losses_of(late, precision, max_norm, steps=7):
    torch.manual_seed(0)
    held = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    table = torch.nn.Parameter(torch.randn(WORDS, WIDE).to(held))
    inner = torch.nn.Parameter(torch.randn(WIDE, WIDE).to(held) / WIDE)
    optimizer = FlatAdamW(
        [table, inner], lr=1e-2, weight_decay=0.1, max_norm=max_norm, late_table=table if late else None,
        copy_dtype=torch.bfloat16 if precision == "bf16" else None,
    )  # fmt: skip
    losses = []
    for step in range(steps):
        ids, runs, labels = batch(step)
        rows = word_embedding(ids, table, runs)
        assert rows.dtype == table.dtype
        if late:
            optimizer.update_late(0)  # behind the reading, and before the head
        hidden = F.linear(rows, inner)
        scale = torch.tensor(1 / TOKENS)
        loss = linear_cross_entropy(hidden, table, labels, scale=scale, unit_upstream=True, into_grad=True)
        loss.backward()
        if late:
            assert table.grad.data_ptr() == table.gradient_place.data_ptr(), "made where it stays"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.settle()
    return losses, table.detach().float(), optimizer.state_dict()["state"][0]["exp_avg"].float()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("max_norm", [0.5, None])
def test_rows_are_read_as_they_will_be(path, precision, max_norm):
    plain, late = (losses_of(late, precision, max_norm) for late in (False, True))
    assert plain[0][-1] < plain[0][0]
    rtol = 1e-6 if precision == "fp32" else 1e-2  # a sum in another order may round the other way
    torch.testing.assert_close(late, plain, rtol=rtol, atol=rtol)


def test_after_settling_rows_are_read_as_they_are(path):
    table = torch.nn.Parameter(torch.randn(WORDS, WIDE))
    optimizer = FlatAdamW([table], lr=0.1, late_table=table)
    ids, runs, _ = batch(0)
    word_embedding(ids, table, runs).square().sum().backward()
    optimizer.step()
    coming = word_embedding(ids, table, runs).detach()
    assert not torch.equal(coming, table[ids])
    optimizer.settle()
    torch.testing.assert_close(table[ids].detach(), coming)
    assert torch.equal(word_embedding(ids, table, runs), table[ids])
