"""bias_gelu and geglu against torch in fp64, and their kernels against the reference, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from automodel.kernels.bias_gelu import bias_gelu, bias_gelu_reference, geglu, geglu_reference

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}  # fp32
APPROXIMATE = pytest.mark.parametrize("approximate", ["none", "tanh"])


def draw(*shape, seed=0):
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).requires_grad_()


@APPROXIMATE
@pytest.mark.parametrize("width", [40, 256, 768])
def test_bias_gelu(path, approximate, width):
    x, bias, upstream = draw(37, width), draw(width, seed=1), torch.randn(37, width)
    ours, exact = bias_gelu(x, bias, approximate), bias_gelu_reference(x.double(), bias.double(), approximate)
    torch.testing.assert_close(ours.double(), exact, **TOLERANCE)
    found = torch.autograd.grad(ours, (x, bias), upstream)
    expected = torch.autograd.grad(exact, (x, bias), upstream.double())
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, **TOLERANCE)


@APPROXIMATE
def test_without_bias_it_is_gelu(path, approximate):
    x = draw(3, 5, 24)
    y = bias_gelu(x, None, approximate)
    torch.testing.assert_close(y, F.gelu(x, approximate=approximate), **TOLERANCE)
    y.sum().backward()
    expected = torch.autograd.grad(F.gelu(x, approximate=approximate).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected, **TOLERANCE)


@APPROXIMATE
@pytest.mark.parametrize("width", [40, 128])
def test_geglu(path, approximate, width):
    x, upstream = draw(21, 2 * width), torch.randn(21, width)
    ours, exact = geglu(x, approximate), geglu_reference(x.double(), approximate)
    torch.testing.assert_close(ours.double(), exact, **TOLERANCE)
    found = torch.autograd.grad(ours, x, upstream)
    torch.testing.assert_close(found[0], torch.autograd.grad(exact, x, upstream.double())[0], **TOLERANCE)


@APPROXIMATE
def test_far_out_it_neither_overflows_nor_leaks(path, approximate):
    x = torch.tensor([[-1e4, -60.0, -12.0, 0.0, 12.0, 60.0, 1e4, 3.0]], requires_grad=True)
    y = bias_gelu(x, None, approximate)
    y.sum().backward()
    torch.testing.assert_close(y, F.gelu(x, approximate=approximate), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(x.grad).all()


def test_unknown_approximation_is_refused():
    with pytest.raises(ValueError, match="'sigmoid'"):
        bias_gelu(torch.ones(1, 4), None, "sigmoid")
