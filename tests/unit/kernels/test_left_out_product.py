"""A layer that is computed again leaves out its last product, and has the same gradients; by the Triton kernels."""

import pytest
import torch

from automodel.kernels.fp8_linear import fp8_swiglu_linear
from automodel.kernels.recompute import compute_again, computing_again
from automodel.kernels.swiglu import swiglu_linear


@pytest.mark.parametrize("make", [swiglu_linear, fp8_swiglu_linear])
def test_gradients_do_not_need_the_result(interpreter, make):
    torch.manual_seed(0)
    x, weight, dy = torch.randn(16, 64), torch.randn(48, 32).requires_grad_(), torch.randn(16, 48)
    found = []
    for read in (True, False):
        leaf = x.clone().requires_grad_()
        y = make(leaf * 1.0, weight, None, "silu", None, read)
        assert y.shape == (16, 48)
        found.append(torch.autograd.grad(y, [leaf, weight], dy))
    for a, b in zip(*found):
        assert torch.equal(a, b)


def test_the_switch_is_put_back():
    assert not computing_again()
    with compute_again():
        assert computing_again()
    assert not computing_again()
