"""FP8 products: the kernels that round, the arithmetic of three products, and gradients close to bf16's.

Triton's interpreter loses the carry where rounding to FP8 goes up to the next power of two (1.97 becomes 1 instead of
2), and loses NaN; torch does that conversion for it here. The GPU's own is tested in `tests/gpu/test_fp8_gpu.py`.
"""

import sys

import pytest
import torch
import torch.nn.functional as F

from automodel.kernels import fp8, fp8_linear
from automodel.kernels.fp8 import E4M3, E5M2, LARGEST, quantise, quantise_reference, round_trip_reference
from automodel.kernels.fp8_linear import fp8_joined_linear, fp8_linear_reference, fp8_pays, fp8_swiglu_linear
from automodel.kernels.swiglu import swiglu_linear_reference


def numbers(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


@pytest.fixture(autouse=True)
def right_conversions(monkeypatch):
    """Of the interpreter, where it is there."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    convert = interpreter._convert_float

    def to_fp8(data, source, target, rounding):
        dtype = {"fp8e4nv": E4M3, "fp8e5": E5M2}.get(target.name)
        if dtype is None:
            return convert(data, source, target, rounding)
        return torch.from_numpy(data.copy()).to(dtype).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", to_fp8)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding(dtype):
    x = numbers(33, 48)
    q = quantise_reference(x, dtype)
    assert q.rows_TI.dtype == dtype
    assert q.scale.item() == pytest.approx(x.abs().max().item() / LARGEST[dtype])
    back = q.rows_TI.float() * q.scale
    normal = x.abs() > x.abs().max() * 2.0**-12
    bits = 4 if dtype == E4M3 else 3
    assert ((back - x).abs() <= x.abs() * 2.0**-bits + 1e-9)[normal].all()
    assert q.columns_IP.shape == (48, 48)
    assert torch.equal(q.columns_IP[:, :33].float(), q.rows_TI.t().float())
    assert not q.columns_IP[:, 33:].float().any()


def test_zeros_stay_zeros(path):
    q = quantise(torch.zeros(16, 32, dtype=torch.bfloat16), E4M3)
    assert torch.isfinite(q.scale).all()
    assert not q.rows_TI.float().any()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(16, 32), (130, 144), (3, 160), (257, 16)])
def test_the_kernels_round_as_the_reference(interpreter, dtype, shape):
    x = numbers(*shape)
    found, exact = quantise(x, dtype), quantise_reference(x, dtype)
    torch.testing.assert_close(found.scale, exact.scale, rtol=1e-6, atol=0)
    exact = quantise_reference(x, dtype, scale=found.scale)
    for ours, theirs in ((found.rows_TI, exact.rows_TI), (found.columns_IP, exact.columns_IP)):
        assert torch.equal(ours.float(), theirs.float())
    again = quantise(x, dtype, rows=False, scale=found.scale)
    assert again.rows_TI is None
    assert torch.equal(again.columns_IP.float(), found.columns_IP.float())
    assert quantise(x, dtype, columns=False).columns_IP is None


def test_what_cannot_be_held_is_not_hidden(interpreter):
    x = numbers(16, 32)
    x[3, 5] = float("nan")
    q = quantise(x, E4M3)
    assert torch.isnan(q.rows_TI.float()[3, 5])


def layers(sizes, inputs, bias):
    weights = [numbers(n, inputs, seed=i).mul_(0.05).requires_grad_() for i, n in enumerate(sizes)]
    biases = [numbers(n, seed=9 + i).requires_grad_() for i, n in enumerate(sizes)] if bias else []
    return weights, biases


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [32, 21])
def test_three_products_by_the_definition(bias, rows):
    weights, biases = layers((32, 16), 64, bias)
    joined = torch.cat([w.detach() for w in weights])
    x, dy = numbers(rows, 64, seed=3).requires_grad_(), numbers(rows, 48, seed=4)
    y, _ = fp8_joined_linear(x, joined, weights, biases)
    y.backward(dy)
    bias_O = torch.cat(biases) if bias else None
    y0, dx0, dw0 = fp8_linear_reference(x.detach(), joined, dy, bias_O)
    assert y.dtype == torch.bfloat16
    for found, exact in ((y, y0), (x.grad, dx0), (torch.cat([w.grad for w in weights]), dw0)):
        torch.testing.assert_close(found.detach().float(), exact.detach(), rtol=1e-2, atol=1e-2)
    if bias:
        torch.testing.assert_close(torch.cat([b.grad for b in biases]).float(), dy.float().sum(0), rtol=2e-2, atol=0.3)


def relative(found, exact):
    return ((found.float() - exact.float()).norm() / exact.float().norm()).item()


def test_close_to_the_products_themselves(path):
    """A number keeps three or two bits; a sum over 128 of them is off by some percent of its size."""
    weights, _ = layers((64,), 128, False)
    x, dy = numbers(48, 128, seed=3).requires_grad_(), numbers(48, 64, seed=4)
    y, around = fp8_joined_linear(x, weights[0].detach(), weights)
    (y * dy + (around * 0.5).sum() / y.numel()).sum().backward()
    w, plain = weights[0].detach().float().requires_grad_(), x.detach().float().requires_grad_()
    (F.linear(plain, w) * dy.float() + (plain * 0.5).sum() / y.numel()).sum().backward()
    assert relative(y, F.linear(plain, w)) < 0.05
    assert relative(x.grad, plain.grad) < 0.08
    assert relative(weights[0].grad, w.grad) < 0.08


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gated_half(path, activation):
    x = numbers(32, 192, seed=1)
    weight, bias = numbers(48, 96, seed=2).mul_(0.05).requires_grad_(), numbers(48, seed=5).requires_grad_()
    dy = numbers(32, 48, seed=4)
    plain = x.clone().float().requires_grad_()
    w, b = weight.detach().float().requires_grad_(), bias.detach().float().requires_grad_()
    y0 = swiglu_linear_reference(plain, w, b, activation)
    y0.backward(dy.float())
    mine = x.clone().requires_grad_()
    y = fp8_swiglu_linear(mine * 1.0, weight, bias, activation)
    y.backward(dy)
    assert relative(y, y0) < 0.05
    assert relative(mine.grad, plain.grad) < 0.08
    assert relative(weight.grad, w.grad) < 0.08
    torch.testing.assert_close(bias.grad.float(), b.grad, rtol=2e-2, atol=0.3)


def test_nothing_is_kept_without_gradients(path):
    weights, _ = layers((32,), 32, False)
    with torch.no_grad():
        y, _ = fp8_joined_linear(numbers(16, 32), weights[0].detach(), weights)
    assert not y.requires_grad


def test_a_gradient_that_has_its_place_is_written_there(path):
    weights, _ = layers((32,), 32, False)
    place = torch.zeros(32, 32, dtype=torch.bfloat16)
    weights[0].gradient_place = place
    y, _ = fp8_joined_linear(numbers(16, 32, seed=1).requires_grad_(), weights[0].detach(), weights)
    y.backward(numbers(16, 32, seed=2))
    assert place.any()
    assert torch.equal(weights[0].grad, place)


def test_what_is_kept_is_half_of_bf16():
    x = numbers(64, 256, seed=1).requires_grad_()
    weights, _ = layers((64,), 256, False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fp8_joined_linear(x, weights[0].detach(), weights)
    of_x = [t for t in kept if t.shape == (256, 64)]
    assert [t.element_size() for t in of_x] == [1]


def test_where_it_pays():
    assert fp8_pays(4096, 6144)
    assert fp8_pays(12288, 4096)
    assert not fp8_pays(2048, 16384)
    assert not fp8_pays(4104, 4096)
    assert fp8_linear.SMALLEST_WIDTH == 4096
    assert fp8.MULTIPLE == 16


def test_the_round_trip_is_what_products_see():
    x = numbers(16, 16)
    assert relative(round_trip_reference(x, E4M3), x) < 0.04
    assert relative(round_trip_reference(x, E5M2), x) < 0.08
