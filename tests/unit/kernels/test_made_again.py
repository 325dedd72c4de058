"""What is cheaper to make again than to keep is not kept, and gradients are the same."""

import gc
import weakref

import torch

from automodel.kernels.made_again import made_again


def product(x: torch.Tensor, weight: torch.Tensor, made: list[int] | None = None):
    """(y @ weightᵀ, y) for y = 2x + 1, with y made again where somebody counts how often."""
    y = x * 2 + 1
    if made is None:
        return y @ weight.t(), y
    with made_again(y, lambda: made.append(1) or x.detach() * 2 + 1):
        return y @ weight.t(), y


def leaves():
    torch.manual_seed(0)
    return torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)


def test_gradients_are_the_same_and_the_tensor_is_gone():
    found = []
    for made in (None, []):
        x, weight = leaves()
        out, y = product(x, weight, made)
        storage = weakref.ref(y.untyped_storage())
        del y
        gc.collect()
        assert (storage() is None) == (made is not None)
        out.square().sum().backward()
        assert made in (None, [1])
        found.append((x.grad, weight.grad))
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


def test_others_keep_what_they_keep():
    x, weight = leaves()
    y, z = x * 2 + 1, torch.randn(6, 4)
    with made_again(y, lambda: x.detach() * 2 + 1):
        both = (y * z).sum() + (y @ weight.t()).sum()
    both.backward()
    assert torch.allclose(x.grad, 2 * (z + weight.detach().sum(0)))
