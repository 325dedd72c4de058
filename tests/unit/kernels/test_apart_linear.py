"""Products of layers whose weights lie anywhere are those of layers that lie side by side."""

import pytest
import torch

from automodel.kernels.linear import apart_linear, joined_linear_reference


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_outputs_and_gradients(biased, around):
    torch.manual_seed(0)
    x = torch.randn(7, 6)
    sizes = (5, 3, 3)
    weights = [torch.randn(n, 6) for n in sizes]
    biases = [torch.randn(n) for n in sizes] if biased else []
    upstream, beside = torch.randn(7, 11), torch.randn(7, 6, dtype=torch.float64)

    def run(make):
        inputs = [t.clone().requires_grad_() for t in (x, *weights, *biases)]
        y, on = make(inputs[0], inputs[1:4], inputs[4:])
        total = (y * upstream).sum() + ((on * beside).sum() if around else 0.0)
        total.backward()
        return [y.detach(), *(t.grad for t in inputs)]

    wanted = run(lambda x, weights, biases: (joined_linear_reference(x, weights, biases), x))
    got = run(apart_linear)
    for one, other in zip(wanted, got, strict=True):
        torch.testing.assert_close(other, one)


def test_a_frozen_input_has_no_gradient():
    x, weight = torch.randn(4, 3), torch.randn(2, 3, requires_grad=True)
    y, _ = apart_linear(x, [weight])
    y.sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(2, 3))
