"""A gated MLP with adapters as one function, its kernels interpreted, against autograd over the definition."""

from __future__ import annotations

import pytest
import torch

from automodel.kernels import lora_mlp as module
from automodel.kernels.frozen import Held
from automodel.kernels.lora_linear import LowRank, lora_joined_linear_reference
from automodel.kernels.lora_mlp import Gated, can_join, lora_mlp
from automodel.kernels.swiglu import swiglu_reference

CLOSE = {"rtol": 2e-4, "atol": 2e-4}
WIDE = 24


def leaf(*shape):
    return (torch.randn(*shape) * 0.5).requires_grad_()


def made(inner, rank, shared):
    torch.manual_seed(0)
    x = leaf(35, WIDE)
    weights = torch.randn(2 * inner, WIDE) * 0.2, torch.randn(WIDE, inner) * 0.2
    if shared:  # one layer that is gate and up
        adapters = [LowRank(leaf(rank, WIDE), leaf(2 * inner, rank), 0.5)]
    else:
        adapters = [LowRank(leaf(rank, WIDE), leaf(inner, rank), s, f) for s, f in ((0.5, 0), (0.7, inner))]
    return x, weights, adapters, LowRank(leaf(3, inner), leaf(WIDE, 3), 0.3)


@pytest.mark.parametrize(("inner", "rank", "shared"), [(64, 4, False), (80, 16, False), (70, 5, True)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_values_and_gradients_are_the_definitions(interpreter, inner, rank, shared, activation):
    x, (up, down), adapters, last = made(inner, rank, shared)
    biases = torch.randn(2 * inner), torch.randn(WIDE)
    learned = [x, *(a.a_RI for a in adapters), *(a.b_OR for a in adapters), last.a_RI, last.b_OR]
    gated = swiglu_reference(lora_joined_linear_reference(x, up, biases[0], adapters), activation)
    expected = lora_joined_linear_reference(gated, down, biases[1], [last])
    theirs = torch.autograd.grad(expected.square().sum() + x.sum(), learned)
    for read in (True, False):
        how = Gated(Held(up), Held(down), *biases, activation, read)
        y, around = lora_mlp(x, how, adapters, last)
        if read:
            torch.testing.assert_close(y, expected, **CLOSE)
        ours = torch.autograd.grad([y, around], learned, [2 * expected.detach(), torch.ones_like(x)])
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_what_the_kernels_do_not_compute_is_known(monkeypatch):
    monkeypatch.setattr(module, "runs_triton", lambda x: True)
    monkeypatch.setattr(module, "JOINS", True)
    x = torch.zeros(4, WIDE, dtype=torch.bfloat16)
    _, _, (gate, up), last = made(64, 4, False)
    assert can_join([gate, up], [last], x)
    assert not can_join([gate], [last], x), "a gate alone"
    assert not can_join([gate, up], [], x)
    assert not can_join([gate, LowRank(leaf(5, WIDE), leaf(64, 5), 1.0, 64)], [last], x), "unlike ranks"
    assert not can_join([gate, up], [LowRank(leaf(128, 64), leaf(WIDE, 128), 1.0)], x), "a rank beyond the registers"
    assert not can_join([gate, up], [last], x.float())
