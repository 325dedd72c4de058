"""rms_norm against transformers' own modules, and its kernels against the reference, forward and backward."""

import pytest
import torch

from automodel.kernels.rms_norm import rms_norm, rms_norm_reference

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}  # fp32, sums over at most 16384 elements
LLAMA = {"offset": 0.0, "round_first": True}
GEMMA = {"offset": 1.0, "round_first": False}
OLMO = {"offset": 0.0, "round_first": False}
STYLES = pytest.mark.parametrize("style", [LLAMA, GEMMA, OLMO], ids=["llama", "gemma", "olmo2"])


def inputs(rows, width, residual=True):
    generator = torch.Generator().manual_seed(rows * 10007 + width)

    def draw(*shape):
        return torch.randn(shape, generator=generator).requires_grad_()

    return draw(rows, width), draw(rows, width) if residual else None, draw(width)


def gradients(outputs, tensors):
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(out.shape, generator=generator) for out in outputs]
    return torch.autograd.grad(outputs, [t for t in tensors if t is not None], upstream)


def check(tensors, style):
    ours = rms_norm(*tensors, eps=1e-5, **style)
    expected = rms_norm_reference(*tensors, eps=1e-5, **style)
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, **TOLERANCE)
    for a, b in zip(gradients(ours, tensors), gradients(expected, tensors)):
        torch.testing.assert_close(a, b, **TOLERANCE)


@STYLES
@pytest.mark.parametrize("width", [32, 96, 768])
def test_residual_and_norm(path, width, style):
    check(inputs(11, width), style)


@STYLES
def test_norm_alone_hands_its_input_on(path, style):
    check(inputs(6, 64, residual=False), style)


@pytest.mark.parametrize("width", [2048, 3000, 8192, 12288])
def test_wide_rows_one_at_a_time(path, width):
    check(inputs(5, width), LLAMA)


def module_of(family, width):
    """The stock module with random weights."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    made = {"llama": LlamaRMSNorm, "gemma": GemmaRMSNorm, "olmo2": Olmo2RMSNorm}[family](width, eps=1e-5)
    with torch.no_grad():
        made.weight.copy_(torch.randn(width, generator=torch.Generator().manual_seed(3)))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("family", "style"), [("llama", LLAMA), ("gemma", GEMMA), ("olmo2", OLMO)])
def test_the_reference_is_the_stock_module_to_the_bit(family, style, dtype):
    """Roundings are in the same order, so bf16 is equal too, not only close."""
    module = module_of(family, 48).to(dtype)
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    y, h = rms_norm_reference(x, None, module.weight, eps=1e-5, **style)
    assert y.dtype == dtype
    assert torch.equal(y, module(x))
    assert h is x


def test_a_slice_of_a_wider_product(path):
    """Queries normalised over all heads (OLMo2) are columns of the joined product: rows lie apart."""
    wide = torch.randn(9, 80, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    ours = rms_norm(wide[:, 16:48], None, weight, **OLMO)
    expected = rms_norm_reference(wide[:, 16:48], None, weight, **OLMO)
    torch.testing.assert_close(ours[0], expected[0], **TOLERANCE)
    for a, b in zip(gradients(ours, (wide, weight)), gradients(expected, (wide, weight))):
        torch.testing.assert_close(a, b, **TOLERANCE)


def test_leading_dimensions_and_no_grad(path):
    x, residual, weight = inputs(12, 32)
    flat, _ = rms_norm(x, residual, weight)
    with torch.no_grad():
        y, h = rms_norm(x.view(3, 4, 32), residual.view(3, 4, 32), weight)
    assert y.shape == h.shape == (3, 4, 32)
    torch.testing.assert_close(y.view(12, 32), flat.detach())


def test_only_one_output_is_used(path):
    """The last norm's sum is read by nobody, and so is the norm of a stream that ends."""
    for index in (0, 1):
        tensors = inputs(6, 40)
        ours = rms_norm(*tensors, **LLAMA)[index]
        expected = rms_norm_reference(*tensors, **LLAMA)[index]
        for a, b in zip(torch.autograd.grad(ours.sum(), tensors[:2]), torch.autograd.grad(expected.sum(), tensors[:2])):
            torch.testing.assert_close(a, b, **TOLERANCE)


def test_half_precision_stays_half_precision(path):
    x, residual, weight = (t.detach().bfloat16() for t in inputs(8, 64))
    y, h = rms_norm(x, residual, weight)
    assert y.dtype == h.dtype == torch.bfloat16
    total = x.double() + residual.double()
    exact = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    assert (y.double() - exact).norm() / exact.norm() < 1e-2  # three roundings to 8 bits


def test_two_dtypes_are_refused():
    with pytest.raises(ValueError, match="one dtype"):
        rms_norm(torch.ones(2, 8), torch.ones(2, 8).bfloat16(), torch.ones(8))


def test_no_rows_at_all(path):
    assert rms_norm(torch.ones(0, 8), torch.ones(0, 8), torch.ones(8))[0].shape == (0, 8)
