"""add_norm against torch's own modules, and its kernels against the reference, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from automodel.kernels.add_norm import add_norm, add_norm_reference
from automodel.kernels.philox import keep_mask

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}  # fp32, sums over at most 8192 elements
SEED = 2**40 + 12345


def inputs(rows, width, *, residual=True, norm_bias=True, linear_bias=False):
    generator = torch.Generator().manual_seed(rows * 10007 + width)

    def draw(*shape):
        return torch.randn(shape, generator=generator).requires_grad_()

    return {
        "x": draw(rows, width),
        "residual": draw(rows, width) if residual else None,
        "weight": draw(width),
        "norm_bias": draw(width) if norm_bias else None,
        "linear_bias": draw(width) if linear_bias else None,
    }


def gradients(outputs, tensors):
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(out.shape, generator=generator) for out in outputs]
    return torch.autograd.grad(outputs, [t for t in tensors.values() if t is not None], upstream)


def check_against_reference(tensors, p, return_sum):
    seed = torch.tensor([SEED])
    out = add_norm(**tensors, dropout_p=p, seed=seed, site=3, eps=1e-6, return_sum=return_sum)
    rows, width = tensors["x"].shape
    keep = keep_mask(seed, 3, rows, width, p) if p else None
    expected = add_norm_reference(**tensors, dropout_p=p, keep=keep, eps=1e-6)
    outputs, expected = (out, expected) if return_sum else ((out,), expected[:1])
    for ours, reference in zip(outputs, expected):
        torch.testing.assert_close(ours, reference, **TOLERANCE)
    for ours, reference in zip(gradients(outputs, tensors), gradients(expected, tensors)):
        torch.testing.assert_close(ours, reference, **TOLERANCE)


@pytest.mark.parametrize("width", [32, 96, 768])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_post_norm(path, width, p):
    check_against_reference(inputs(11, width), p, return_sum=False)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_pre_norm_returns_the_sum_and_takes_its_gradient(path, p):
    check_against_reference(inputs(6, 64, norm_bias=False), p, return_sum=True)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_bias_of_the_linear_layer_before_it(path, p):
    check_against_reference(inputs(9, 48, linear_bias=True), p, return_sum=False)


@pytest.mark.parametrize("return_sum", [False, True])
def test_plain_layer_norm(path, return_sum):
    check_against_reference(inputs(5, 40, residual=False), 0.0, return_sum)


@pytest.mark.parametrize("width", [2048, 3000, 8192])
def test_wide_rows_one_at_a_time(path, width):
    check_against_reference(inputs(6, width), 0.2, return_sum=False)


def test_the_reference_is_what_an_encoder_layer_computes():
    tensors = inputs(7, 32, linear_bias=True)
    layer = torch.nn.LayerNorm(32, eps=1e-12)
    with torch.no_grad():
        layer.weight.copy_(tensors["weight"])
        layer.bias.copy_(tensors["norm_bias"])
    y, h = add_norm_reference(**tensors)
    torch.testing.assert_close(h, tensors["residual"] + tensors["x"] + tensors["linear_bias"])
    torch.testing.assert_close(y, layer(h))


def test_dropout_keeps_the_expectation(path):
    x, weight = torch.ones(64, 256), torch.ones(256)
    _, h = add_norm(x, None, weight, dropout_p=0.25, seed=torch.tensor([1]), return_sum=True)
    assert h.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert abs(h.mean().item() - 1.0) < 0.02


def test_advancing_the_seed_draws_a_new_mask(path):
    x, weight, seed = torch.ones(8, 64), torch.ones(64), torch.tensor([1])
    draws = []
    for _ in range(2):
        draws.append(add_norm(x, None, weight, dropout_p=0.5, seed=seed, return_sum=True)[1].clone())
        seed += 1
    assert not torch.equal(*draws)


def test_leading_dimensions_and_no_grad(path):
    tensors = inputs(12, 32)
    flat = add_norm(**tensors)
    shaped = {k: v.view(3, 4, 32) if v is not None and v.ndim == 2 else v for k, v in tensors.items()}
    with torch.no_grad():
        y = add_norm(**shaped)
    assert y.shape == (3, 4, 32)
    torch.testing.assert_close(y.view(12, 32), flat.detach())


def test_frozen_parameters_get_no_gradient(path):
    tensors = {k: None if v is None else v.detach() for k, v in inputs(4, 32).items()}
    tensors["x"].requires_grad_()
    add_norm(**tensors).sum().backward()
    assert tensors["x"].grad is not None
    assert tensors["weight"].grad is None


def test_narrow_activations_with_wide_weights(path):
    tensors = {k: v if v is None or v.ndim == 1 else v.detach().bfloat16() for k, v in inputs(8, 64).items()}
    y, h = add_norm(**tensors, return_sum=True)
    assert y.dtype == h.dtype == torch.bfloat16
    exact = F.layer_norm(
        tensors["x"].double() + tensors["residual"].double(),
        (64,),
        tensors["weight"].double(),
        tensors["norm_bias"].double(),
    )
    error = (y.double() - exact).norm() / exact.norm()
    assert error < 1e-2  # two roundings to 8 bits


def test_under_compile_it_is_plain_torch_in_one_graph(path):
    tensors = inputs(8, 32)
    compiled = torch.compile(add_norm, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**tensors), add_norm_reference(**tensors)[0])
    _, h = compiled(torch.ones(64, 64), None, torch.ones(64), dropout_p=0.25, seed=torch.tensor([1]), return_sum=True)
    assert abs((h == 0).double().mean().item() - 0.25) < 0.05


def test_no_rows_at_all(path):
    assert add_norm(torch.ones(0, 8), torch.ones(0, 8), torch.ones(8)).shape == (0, 8)


def test_dropout_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="needs `seed`"):
        add_norm(torch.ones(2, 8), None, torch.ones(8), dropout_p=0.1)


@pytest.mark.parametrize("residual", [True, False])
def test_dropout_after_the_norm(path, residual):
    tensors = inputs(7, 96, residual=residual, linear_bias=True)
    seed = torch.tensor([SEED])
    out = add_norm(**tensors, dropout_p=0.3, seed=seed, site=5, drop_last=True)
    keep = keep_mask(seed, 5, 7, 96, 0.3)
    expected, _ = add_norm_reference(**tensors, dropout_p=0.3, keep=keep, drop_last=True)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    assert 0.1 < (out == 0).float().mean() < 0.5
    for ours, reference in zip(gradients((out,), tensors), gradients((expected,), tensors)):
        torch.testing.assert_close(ours, reference, **TOLERANCE)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_gradients_that_may_be_one_tensor(path, p):
    """Shared only where they are the same numbers: with dropout before the sum they are not."""
    tensors = inputs(6, 64, norm_bias=False)
    seed = torch.tensor([SEED])
    keep = keep_mask(seed, 3, 6, 64, p) if p else None
    found = add_norm(**tensors, dropout_p=p, seed=seed, site=3, return_sum=True, shares=True)
    expected = add_norm_reference(**tensors, dropout_p=p, keep=keep)
    for ours, reference in zip(gradients(found, tensors), gradients(expected, tensors)):
        torch.testing.assert_close(ours, reference, **TOLERANCE)
