"""Weights of 4 and 8 bits against the real bitsandbytes, on the CPU: codes, scales, and what they expand to.

bitsandbytes is not a dependency; without it these tests are skipped, visibly.
"""

from __future__ import annotations

import pytest
import torch

from automodel.kernels.packed import expand_reference, group_scales, pack

bnb = pytest.importorskip("bitsandbytes")
SHAPES = [(48, 64), (96, 256), (37, 64), (320, 1024)]


def weights(shape, seed=0):
    torch.manual_seed(seed)
    weight = torch.randn(shape) * torch.rand(shape[0], 1) * 0.05
    weight[0] = 0.0  # a group of zeros
    return weight


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_four_bits_are_theirs(shape, kind, double):
    weight = weights(shape)
    codes, state = bnb.functional.quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type=kind)
    ours = pack(weight, kind, double)
    their_codes = torch.stack([codes.flatten() >> 4, codes.flatten() & 15])
    our_codes = torch.stack([ours.codes >> 4, ours.codes & 15])
    # Half-way between two entries either is right; of a group of zeros, every code of fp4's two zeros is.
    assert (their_codes != our_codes).float().mean() < 1e-3
    if double:
        assert (state.absmax != ours.scales).float().mean() < 1e-2
        torch.testing.assert_close(ours.mean, state.offset, rtol=1e-6, atol=0)
        torch.testing.assert_close(ours.wide_scales, state.state2.absmax, rtol=1e-5, atol=1e-9)
    else:
        torch.testing.assert_close(ours.scales, state.absmax, rtol=0, atol=0)
    theirs = bnb.functional.dequantize_4bit(codes, state)
    different = ((expand_reference(ours) - theirs).abs() > 2e-3 * theirs.abs().max()).float().mean()
    assert different < 1e-3


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_their_codes_expand_to_their_numbers(kind):
    """The same bytes, read by both: equal to the last bit but one."""
    weight = weights((96, 256), seed=3)
    codes, state = bnb.functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type=kind)
    ours = pack(weight, kind)
    theirs = type(ours)(kind, (96, 256), codes.flatten(), state.absmax, state.state2.absmax, state.offset)
    nested = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    torch.testing.assert_close(group_scales(theirs), nested, rtol=1e-6, atol=1e-8)
    expected = bnb.functional.dequantize_4bit(codes, state)
    torch.testing.assert_close(expand_reference(theirs), expected, rtol=1e-6, atol=1e-8)


def test_eight_bits_are_theirs():
    weight = weights((48, 64))
    weight[0] = 0.01
    codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight.half())
    ours = pack(weight.half(), "int8")
    torch.testing.assert_close(ours.scales, scales.float(), rtol=1e-3, atol=0)
    assert (codes.int() - ours.codes.int()).abs().max() <= 1
    assert (codes != ours.codes).float().mean() < 5e-3
    expected = bnb.functional.int8_vectorwise_dequant(codes, scales)
    torch.testing.assert_close(expand_reference(ours), expected, rtol=0, atol=float(scales.max()) / 127 * 1.01)


def test_a_layer_computes_what_linear4bit_computes():
    weight, x = weights((96, 64), seed=5), torch.randn(7, 64)
    layer = bnb.nn.Linear4bit(64, 96, bias=False, compute_dtype=torch.float32, compress_statistics=True)
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4")
    layer = layer.to("cpu")
    if layer.weight.quant_state is None:
        layer.weight = layer.weight._quantize("cpu")
    ours = x @ pack(weight, "nf4").expand(torch.float32).t()
    torch.testing.assert_close(ours, layer(x), rtol=1e-3, atol=1e-3 * float(ours.detach().abs().max()))
