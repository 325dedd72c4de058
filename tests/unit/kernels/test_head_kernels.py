"""The kernels of a classifier's head against torch, forward and backward."""

import pytest
import torch

from automodel.kernels.activate import Dropout, activate, activate_reference
from automodel.kernels.few_classes import ROWS
from automodel.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).requires_grad_()


def twins(tensors):
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("function", ["none", "relu", "tanh", "gelu"])
@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("biased", [True, False])
def test_activation(path, function, p, biased):
    ours = [draw(7, 96), draw(96) if biased else None]
    theirs = twins(ours)
    dropout = Dropout(p, torch.tensor([31]) if p else None, site=4)
    found, expected = activate(*ours, function, dropout), activate_reference(*theirs, function, dropout)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(9))
    found.backward(upstream)
    expected.backward(upstream)
    for own, other in zip(ours, theirs):
        if own is not None:
            torch.testing.assert_close(own.grad, other.grad, **TOLERANCE)


@pytest.mark.parametrize(("rows", "width", "classes"), [(5, 64, 2), (ROWS, 40, 3), (2 * ROWS + 3, 96, 9), (4, 32, 16)])
@pytest.mark.parametrize("biased", [True, False])
def test_loss_and_gradients_over_few_classes(path, rows, width, classes, biased):
    ours = [draw(rows, width), draw(classes, width), draw(classes, seed=3) if biased else None]
    theirs = twins(ours)
    labels = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(1))
    labels[1] = -100
    scale = torch.tensor(0.25)
    found = linear_cross_entropy(*ours[:2], labels, scale=scale, bias=ours[2], unit_upstream=True, into_grad=True)
    expected = linear_cross_entropy_reference(*theirs[:2], labels, scale=scale, bias=theirs[2])
    torch.testing.assert_close(found, expected, **TOLERANCE)
    found.backward()
    expected.backward()
    for own, other in zip(ours, theirs):
        if own is not None:
            torch.testing.assert_close(own.grad, other.grad, **TOLERANCE)
    assert not ours[0].grad[1].any()
