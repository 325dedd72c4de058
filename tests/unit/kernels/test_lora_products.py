"""Joined products with adapters against their plain definition: values, gradients, what is kept, what is left out."""

from __future__ import annotations

import pytest
import torch

from automodel.kernels.frozen import Beside, Fp8Held, Held, same_memory
from automodel.kernels.lora_linear import (
    LowRank,
    lora_joined_linear,
    lora_joined_linear_reference,
    lora_swiglu_linear,
)
from automodel.kernels.swiglu import swiglu_reference

T, WIDE, WIDTHS = 7, 8, (6, 4, 4)
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def made(which, bias=True, unlike=1.0):
    """x, weight, bias and the adapters of some of three layers, of different ranks and scales."""
    torch.manual_seed(0)
    x, weight = leaf(T, WIDE), torch.randn(sum(WIDTHS), WIDE, dtype=torch.float64)
    adapters, first = [], 0
    for index, width in enumerate(WIDTHS):
        a, b = leaf(2 + index, WIDE), leaf(width, 2 + index)
        if index in which:
            adapters.append(LowRank(a, b, 0.5 + index * unlike, first))
        first += width
    return x, weight, torch.randn(sum(WIDTHS), dtype=torch.float64) if bias else None, adapters


def gradients_of(y, x, adapters):
    learned = [x, *(a.a_RI for a in adapters), *(a.b_OR for a in adapters)]
    return torch.autograd.grad(y.square().sum(), learned)


@pytest.mark.parametrize("which", [(0, 1, 2), (0, 2), (1,), ()])
@pytest.mark.parametrize(("bias", "unlike"), [(True, 1.0), (False, 0.0)])  # scales of each layer, or one for all
def test_products_and_gradients_are_the_references(which, bias, unlike):
    x, weight, offset, adapters = made(which, bias, unlike)
    expected = lora_joined_linear_reference(x, weight, offset, adapters)
    y, around = lora_joined_linear(x, Held(weight), offset, adapters)
    torch.testing.assert_close(y, expected, **CLOSE)
    assert around.data_ptr() == x.data_ptr()
    for ours, theirs in zip(gradients_of(y, x, adapters), gradients_of(expected, x, adapters), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("which", [(0, 1, 2), (0, 2)])
def test_b_beside_the_weights_is_part_of_the_product(which):
    x, weight, offset, adapters = made(which, unlike=0.0)
    expected = lora_joined_linear_reference(x, weight, offset, adapters)
    parts = [torch.nn.Parameter(part.clone(), requires_grad=False) for part in weight.split(list(WIDTHS))]
    base = Beside(parts, sum(a.a_RI.shape[0] for a in adapters))
    assert torch.equal(torch.cat(list(parts)), weight), "the layers keep their weights, as views"
    for _ in range(2):
        y, _ = lora_joined_linear(x, base, offset, adapters)
        torch.testing.assert_close(y, expected, **CLOSE)
        for ours, theirs in zip(gradients_of(y, x, adapters), gradients_of(expected, x, adapters), strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)
        expected = lora_joined_linear_reference(x, weight, offset, adapters)


def test_the_way_around_meets_the_product_in_its_backward():
    x, weight, offset, adapters = made((0, 1, 2))
    y, around = lora_joined_linear(x, Held(weight), offset, adapters)
    found = torch.autograd.grad(y.square().sum() + (3.0 * around).square().sum(), x)
    expected = lora_joined_linear_reference(x, weight, offset, adapters)
    theirs = torch.autograd.grad(expected.square().sum() + (3.0 * x).square().sum(), x)
    torch.testing.assert_close(found, theirs, **CLOSE)


def test_dropout_is_what_the_adapters_read():
    x, weight, offset, adapters = made((0, 1))
    mask = (torch.rand(T, WIDE, dtype=torch.float64) > 0.5) * 2.0
    y, _ = lora_joined_linear(x, Held(weight), offset, adapters, dropped_TI=x * mask)
    expected = lora_joined_linear_reference(x, weight, offset, adapters, x * mask)
    torch.testing.assert_close(y, expected, **CLOSE)
    for ours, theirs in zip(gradients_of(y, x, adapters), gradients_of(expected, x, adapters), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize(("which", "expected"), [((0, 1, 2), [T * WIDE, T * 9]), ((), [])])
def test_x_is_kept_once_for_three_layers_and_not_at_all_without_adapters(which, expected):
    x, weight, offset, adapters = made(which)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lora_joined_linear(x, Held(weight), offset, adapters)
    assert sorted(t.numel() for t in kept) == sorted(expected)


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gated_product_is_the_references(path, adapted, activation):
    close = CLOSE if path == "reference" else {"rtol": 1e-5, "atol": 1e-5}  # the kernels compute in fp32
    torch.manual_seed(1)
    x, weight, bias = leaf(T, 12), torch.randn(WIDE, 6, dtype=torch.float64), torch.randn(WIDE, dtype=torch.float64)
    adapter = LowRank(leaf(3, 6), leaf(WIDE, 3), 0.7) if adapted else None
    learned = [x] if adapter is None else [x, adapter.a_RI, adapter.b_OR]
    adapters = [] if adapter is None else [adapter]
    expected = lora_joined_linear_reference(swiglu_reference(x, activation), weight, bias, adapters)
    theirs = torch.autograd.grad(expected.square().sum(), learned)
    for read in (True, False):  # what is not read has the same gradients
        y = lora_swiglu_linear(x * 1.0, Held(weight), bias, activation, adapter, read=read)  # written over
        if read:
            torch.testing.assert_close(y, expected, **close)
        for ours, other in zip(torch.autograd.grad(y, learned, 2 * expected.detach()), theirs, strict=True):
            torch.testing.assert_close(ours, other, **close)


def test_weights_below_each_other_are_one_matrix():
    q, k = torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(2, 3))
    before = torch.cat([q.detach(), k.detach()])
    joined = same_memory([q, k])
    assert torch.equal(joined, before)
    with torch.no_grad():
        joined[4:] = 1.0
    assert bool((k == 1.0).all())
    assert q.shape == (4, 3)


def test_a_base_in_fp8_is_near_the_weight_and_gives_its_adapters_full_gradients():
    torch.manual_seed(2)
    x, weight = torch.randn(32, 64, requires_grad=True), torch.randn(48, 64)
    adapter = LowRank(torch.randn(4, 64, requires_grad=True), torch.randn(48, 4, requires_grad=True), 0.5)
    results = []
    for base in (Held(weight), Fp8Held(weight)):
        y, _ = lora_joined_linear(x, base, None, [adapter])
        results.append((y, *torch.autograd.grad(y, [x, adapter.a_RI, adapter.b_OR], torch.ones_like(y))))
    for exact, rounded, allowed in zip(*results, (0.05, 0.08, 1e-6, 1e-6), strict=True):
        assert (exact - rounded).norm() <= allowed * exact.norm()
    assert not torch.equal(results[0][0], results[1][0])
