"""swiglu and swiglu_linear against torch in fp64 and transformers' MLPs, and their kernels against the reference."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from automodel.kernels.swiglu import ACTIVATIONS, swiglu, swiglu_linear, swiglu_linear_reference, swiglu_reference

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}  # fp32
ACTIVATION = pytest.mark.parametrize("activation", sorted(ACTIVATIONS))


def draw(*shape, seed=0):
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).requires_grad_()


def product(x):
    """A fresh tensor, as a GEMM hands over: the gradient is written over it."""
    return x * 1.0


@ACTIVATION
@pytest.mark.parametrize("width", [40, 256])
def test_swiglu(path, activation, width):
    x, upstream = draw(21, 2 * width), torch.randn(21, width)
    ours, exact = swiglu(product(x), activation), swiglu_reference(x.double(), activation)
    torch.testing.assert_close(ours.double(), exact, **TOLERANCE)
    found = torch.autograd.grad(ours, x, upstream)[0]
    torch.testing.assert_close(found, torch.autograd.grad(exact, x, upstream.double())[0], **TOLERANCE)


KEEP = pytest.mark.parametrize("keep", [False, True], ids=["made again", "kept"])


@KEEP
@ACTIVATION
@pytest.mark.parametrize("biased", [False, True])
def test_swiglu_linear(path, activation, biased, keep):
    x, weight, bias = draw(21, 80), draw(24, 40, seed=1), draw(24, seed=2) if biased else None
    learned = [t for t in (x, weight, bias) if t is not None]
    upstream = torch.randn(21, 24)
    ours = swiglu_linear(product(x), weight, bias, activation, keep=keep)
    exact = swiglu_linear_reference(*(None if t is None else t.double() for t in (x, weight, bias)), activation)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)
    found = torch.autograd.grad(ours, learned, upstream)
    for a, b in zip(found, torch.autograd.grad(exact, learned, upstream.double())):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=3e-4)  # sums of 40 products of numbers up to 100


@pytest.mark.parametrize(("family", "activation"), [("llama", "silu"), ("gemma", "gelu_tanh"), ("phi3", "silu")])
def test_it_is_what_the_stock_mlp_computes(family, activation):
    from tiny_models import tiny

    _, model = tiny(family, "causal-lm")
    mlp = model.model.layers[0].mlp
    first = [mlp.gate_up_proj] if family == "phi3" else [mlp.gate_proj, mlp.up_proj]
    x = draw(5, 32)
    joined = torch.cat([linear(x) for linear in first], dim=-1)
    torch.testing.assert_close(swiglu_linear_reference(joined, mlp.down_proj.weight, None, activation), mlp(x))


def test_far_out_it_neither_overflows_nor_leaks(path):
    x = torch.tensor([[-1e4, -90.0, -12.0, 0.0, 12.0, 90.0, 1e4, 3.0] * 2], requires_grad=True)
    y = swiglu(product(x))
    y.sum().backward()
    torch.testing.assert_close(y, swiglu_reference(x), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(x.grad).all()


@KEEP
@pytest.mark.usefixtures("interpreter")
def test_a_second_backward_pass_is_refused_and_not_wrong(keep):
    """The first one wrote over what was saved."""
    x, weight = draw(4, 16), draw(3, 8, seed=1)
    y = swiglu_linear(product(x), weight, keep=keep)
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.usefixtures("interpreter")
def test_both_ways_give_the_same_bits():
    x, weight, upstream = draw(9, 64), draw(12, 32, seed=1), torch.randn(9, 12)
    found = []
    for keep in (False, True):
        y = swiglu_linear(product(x), weight, keep=keep)
        found.append([y, *torch.autograd.grad(y, (x, weight), upstream)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@KEEP
def test_under_checkpointing_it_writes_over_the_copy_that_was_made_again(path, keep):
    x, weight, upstream = draw(6, 32), draw(5, 16, seed=1), torch.randn(6, 5)
    ours = checkpoint(lambda t: swiglu_linear(product(t), weight, keep=keep), x, use_reentrant=False)
    exact = swiglu_linear_reference(x, weight)
    for a, b in zip(
        torch.autograd.grad(ours, (x, weight), upstream), torch.autograd.grad(exact, (x, weight), upstream)
    ):
        torch.testing.assert_close(a, b, **TOLERANCE)


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="'relu'"):
        swiglu(torch.ones(1, 4), "relu")
