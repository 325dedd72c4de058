"""Rows that are updated when they are needed end where plain AdamW ends."""

import pytest
import torch
import torch.nn.functional as F

from automodel.data.collate import _runs
from automodel.kernels import lazy_rows
from automodel.kernels.embedding import word_embedding
from automodel.kernels.flat_adamw import FlatAdamW
from tiers import quick

VOCABULARY, WIDTH, PADDING = 40, 24, 0


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.head = torch.nn.Linear(WIDTH, 3)

    def forward(self, ids):
        runs = torch.from_numpy(_runs(ids.numpy()))
        rows = word_embedding(ids, self.table, runs, PADDING, lazy_rows.lazy_rows_of(self.table))
        return self.head(rows)


def batch(step):
    """Few distinct tokens, so that most rows wait; the padding token among them; token 39 in the first batch only."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 12, (9,), generator=generator) + 3 * (step % 5)
    ids[0], ids[1] = (39 if step == 0 else ids[0]), PADDING
    return ids, torch.randint(0, 3, (9,), generator=generator)


def train(lazy, steps, *, precision=None, stop_at=None):
    model = Tagger()
    if precision == "bf16-pure":
        model.to(torch.bfloat16)
    decayed = [model.table, model.head.weight]
    optimizer = FlatAdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": [model.head.bias], "weight_decay": 0.0}],
        lr=2e-2,
        max_norm=0.5,
        copy_dtype=torch.bfloat16 if precision == "bf16" else None,
        lr_factors=torch.linspace(1.0, 0.2, steps, dtype=torch.float64),
        lazy=model.table if lazy else None,
    )
    norms = []
    for step in range(steps):
        ids, labels = batch(step)
        F.cross_entropy(model(ids).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.grad_norm))
        if step == stop_at:
            optimizer.settle()
    return model, optimizer, norms


def moments(optimizer):
    flat = optimizer.flat
    return {
        i: [p.view(b).clone() for b in (flat.weight, flat.exp_avg, flat.exp_avg_sq)] for i, p in enumerate(flat.places)
    }


@pytest.mark.parametrize("path", ["reference", "interpreter"])
@pytest.mark.parametrize("precision", quick([None, "bf16", "bf16-pure"], "bf16"))
def test_after_settling_everything_is_what_plain_adamw_gives(request, path, precision):
    if path == "interpreter":
        request.getfixturevalue("interpreter")
    plain_model, plain, plain_norms = train(False, 17, precision=precision)
    model, optimizer, norms = train(True, 17, precision=precision)
    assert int(optimizer.lazy_rows.last_V[39]) == 1, "a row nobody reads waits"
    optimizer.settle()
    torch.testing.assert_close(norms, plain_norms, rtol=1e-4, atol=1e-6)
    # Plain torch adds up the gradients of equal tokens in bf16, and pure bf16 rounds the weights after every step.
    tolerance = {None: 1e-6, "bf16": 2e-4, "bf16-pure": 2e-2}[precision]
    tolerance = {"rtol": 10 * tolerance, "atol": tolerance}
    for ours, theirs in zip(moments(optimizer).values(), moments(plain).values()):
        torch.testing.assert_close(ours, theirs, **tolerance)
    torch.testing.assert_close(model.table, plain_model.table, **tolerance)


def test_settling_in_the_middle_changes_nothing():
    _, often, _ = train(True, 12, stop_at=5)
    _, once, _ = train(True, 12)
    often.settle()
    once.settle()
    torch.testing.assert_close(moments(often), moments(once), rtol=0, atol=0)


def test_history_is_a_ring(monkeypatch):
    for module in (lazy_rows, __import__("automodel.kernels.adamw", fromlist=["RING"])):
        monkeypatch.setattr(module, "RING", 4)
    model, optimizer, _ = train(True, 4)
    optimizer.settle()
    for step in range(4, 8):
        F.cross_entropy(model(batch(step)[0]).float(), batch(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.settle()
    assert optimizer.lazy_rows.history.shape[0] == 4
    assert (optimizer.lazy_rows.last_V == 8).all()
    assert torch.isfinite(model.table).all()


def test_state_dict_is_settled_and_loads_into_plain_adamw():
    _, lazy, _ = train(True, 9)
    state = lazy.state_dict()
    model = Tagger()
    decayed = [model.table, model.head.weight]
    plain = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": [model.head.bias], "weight_decay": 0.0}]
    )
    plain.load_state_dict(state)
    _, reference, _ = train(False, 9)
    expected = moments(reference)
    torch.testing.assert_close(plain.state[model.table]["exp_avg"], expected[0][1], rtol=1e-5, atol=1e-7)
    assert int(plain.state[model.table]["step"]) == 9
