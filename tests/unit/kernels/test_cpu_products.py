"""Products on the CPU by each library, against fp64; copies in bf16 that are never out of date."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from automodel.kernels.cpu_products import (
    Bf16Copies,
    Bf16Products,
    Fp32Products,
    OnednnProducts,
    as_copied,
    cpu_linear,
    has_onednn,
    make_products,
)

KINDS = [Fp32Products(), OnednnProducts(), Bf16Products()]
TOKENS, INPUTS, OUTPUTS = 37, 24, 40
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative, of a whole tensor: fp32 sums in another order; bf16 has 8 bits."""


def close(ours: torch.Tensor, exact: torch.Tensor, products: Fp32Products) -> None:
    assert torch.linalg.vector_norm(ours.double() - exact) <= TOLERANCE[products.dtype] * torch.linalg.vector_norm(
        exact
    )


def drawn() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(shape, generator=generator)
        for shape in ((TOKENS, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,), (TOKENS, OUTPUTS))
    )


@pytest.fixture(params=KINDS, ids=["torch", "onednn", "bf16"])
def products(request):
    if isinstance(request.param, OnednnProducts):
        assert has_onednn(), "the tested torch has it"
    return request.param


def test_each_product_equals_its_definition(products):
    x, w, b, dy = (t.to(products.dtype) for t in drawn())
    wide_x, wide_w, wide_b, wide_dy = (t.double() for t in (x, w, b, dy))
    onto_y, onto_x = torch.randn(TOKENS, OUTPUTS), torch.randn(TOKENS, INPUTS)
    close(products.linear(x, w, b), wide_x @ wide_w.t() + wide_b, products)
    close(products.linear(x, w, None), wide_x @ wide_w.t(), products)
    kept = onto_y.clone()
    close(products.add_linear(onto_y, x, w, b), onto_y.double() + wide_x @ wide_w.t() + wide_b, products)
    assert torch.equal(onto_y, kept), "a residual is read once more"
    close(products.input_gradient(dy, w), wide_dy @ wide_w, products)
    close(products.add_input_gradient(onto_x.clone(), dy, w), onto_x.double() + wide_dy @ wide_w, products)
    close(products.weight_gradient(dy, x), wide_dy.t() @ wide_x, products)
    close(products.bias_gradient(dy), wide_dy.sum(0), products)
    assert products.weight_gradient(dy, x).dtype == products.bias_gradient(dy).dtype == torch.float32
    assert products.add_linear(onto_y, x, w, b).dtype == torch.float32


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
def test_a_linear_layer_and_its_gradients(products, bias, transposed):
    x, w, b, dy = drawn()
    x = x.view(1, TOKENS, INPUTS).requires_grad_()
    stored = (w.t().contiguous() if transposed else w).requires_grad_()
    b = b.requires_grad_() if bias else None
    copies = Bf16Copies()
    used = copies.of(stored) if products.dtype == torch.bfloat16 else stored.detach()
    copies.refresh()
    weight, used = (stored.t(), used.t()) if transposed else (stored, used)
    y = cpu_linear(x, weight, b, used, products)
    inputs = [x, stored] + ([b] if bias else [])
    ours = torch.autograd.grad(y, inputs, dy.view(1, TOKENS, OUTPUTS))
    assert y.dtype == torch.float32
    assert all(g.dtype == torch.float32 for g in ours)
    exact = F.linear(x.double(), weight.double(), b.double() if bias else None)
    close(y, exact, products)
    for mine, theirs in zip(ours, torch.autograd.grad(exact, inputs, dy.view(1, TOKENS, OUTPUTS).double())):
        close(mine, theirs, products)


def test_a_frozen_weight_gets_no_gradient(products):
    x, w, b, _ = drawn()
    used = w.to(products.dtype)
    y = cpu_linear(x.requires_grad_(), w, b, used, products)
    y.sum().backward()
    assert w.grad is None
    assert x.grad is not None


def test_a_copy_of_several_parameters_has_them_one_below_the_other():
    first, second = torch.randn(3, 4), torch.randn(2, 4)
    copies = Bf16Copies()
    both = copies.of(first, second)
    copies.refresh()
    assert torch.equal(both, torch.cat([first, second]).bfloat16())
    assert copies.of(first, second) is both


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.mul_(2.0),
        lambda p: p.copy_(torch.ones_like(p)),
        lambda p: setattr(p, "data", torch.full_like(p, 3.0)),
    ],
    ids=["in place", "copied over", "another memory"],
)
def test_a_copy_follows_its_parameter(change):
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    copies = Bf16Copies()
    copy = copies.of(parameter)
    copies.refresh()
    with torch.no_grad():
        change(parameter)
    copies.refresh()
    assert torch.equal(copy, parameter.detach().bfloat16())


def test_only_what_changed_is_written_again():
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    copies = Bf16Copies()
    copy = copies.of(parameter)
    copies.refresh()
    before = copy._version
    copies.refresh()
    assert copy._version == before


def test_an_optimizer_that_does_not_count_its_changes_says_so():
    """torch's fused AdamW leaves the count of changes alone on a CPU; the day it does not, the hook may go."""
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    optimizer = torch.optim.AdamW([parameter], lr=0.5, fused=True)
    copies = Bf16Copies()
    copy = copies.of(parameter)
    copies.refresh()
    parameter.grad, count = torch.ones_like(parameter), parameter._version
    optimizer.step()
    assert parameter._version == count
    copies.forget()
    copies.refresh()
    assert torch.equal(copy, parameter.detach().bfloat16())


def test_the_gradient_of_a_copy_goes_to_the_parameter():
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    copies = Bf16Copies()
    copy = copies.of(parameter)
    copies.refresh()
    (as_copied(parameter, copy) * 2.0).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.float32
    assert torch.equal(parameter.grad, torch.full((3, 4), 2.0))


def test_a_precision_has_its_products():
    assert type(make_products("bf16", "onednn")) is Bf16Products
    assert type(make_products("fp32", "onednn")) is OnednnProducts
    assert type(make_products("fp32", "torch")) is Fp32Products
