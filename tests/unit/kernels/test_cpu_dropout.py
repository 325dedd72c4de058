"""Dropout from cheap bits: its rate and independence, and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from automodel.kernels.cpu_dropout import (
    LEVELS,
    cpu_dropout,
    draw_kept,
    kept_scale,
    threshold,
)
from automodel.models.cheap_dropout import CheapDropout, use_cheap_dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1 / LEVELS])
def test_drops_with_the_probability_it_was_given(p):
    torch.manual_seed(0)
    kept = draw_kept((1000, 4001), p)
    assert set(kept.unique().tolist()) <= {0.0, 1.0}
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert kept.mean().item() == pytest.approx(1 - p, abs=5 * deviation + 1 / LEVELS)
    assert kept_scale(p) * (1 - threshold(p) / LEVELS) == pytest.approx(1.0, rel=1e-12)


def test_neighbours_are_independent():
    """Four elements share a word of the generator: no two of them, nor two of different words, agree too often."""
    torch.manual_seed(1)
    kept = draw_kept((1 << 20,), 0.3).sub_(0.7)
    for distance in (1, 2, 3, 4, 5, 64):
        correlation = (kept[distance:] * kept[:-distance]).mean().item() / (0.3 * 0.7)
        assert abs(correlation) < 5 / len(kept) ** 0.5, distance


def test_a_restored_state_draws_the_same():
    state = torch.get_rng_state()
    first = draw_kept((37, 11), 0.2)
    assert not torch.equal(first, draw_kept((37, 11), 0.2))
    torch.set_rng_state(state)
    assert torch.equal(first, draw_kept((37, 11), 0.2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gradient_passes_where_the_value_passed(dtype):
    torch.manual_seed(2)
    x = torch.randn(50, 33, dtype=dtype, requires_grad=True)
    y = cpu_dropout(x, 0.25)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert torch.equal(y, x * x.grad)
    assert set(x.grad.unique().tolist()) == {0.0, torch.tensor(kept_scale(0.25), dtype=dtype).item()}
    assert cpu_dropout(x, 0.0) is x
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        cpu_dropout(x, 1.5)


def test_modules_are_swapped_for_training_alone():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.0), nn.Dropout1d(0.5), nn.Dropout(0.5, inplace=True)
    )
    assert use_cheap_dropout(model) == 1
    assert isinstance(model[1].forward, CheapDropout)
    x = torch.randn(64, 4)
    torch.manual_seed(4)
    dropped = model[1](x)
    torch.manual_seed(4)
    assert torch.equal(dropped, cpu_dropout(x, 0.5))
    assert 0.2 < (dropped == 0).float().mean() < 0.8
    assert torch.equal(model.eval()[1](x), x)
