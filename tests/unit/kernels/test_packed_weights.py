"""Weights in 4 and 8 bits: sizes, errors, odd shapes, and the Triton kernels (interpreted) against the definition."""

from __future__ import annotations

import pytest
import torch

from automodel.kernels.frozen import Expanding
from automodel.kernels.packed import Packed, expand_reference, pack

KINDS = [("nf4", True), ("nf4", False), ("fp4", True), ("int8", False)]
ERROR = {"nf4": 0.1, "fp4": 0.2, "int8": 0.01}  # root mean square, as a share of the weights'


def weight_of(rows, columns):
    torch.manual_seed(0)
    return torch.randn(rows, columns) * 0.02


@pytest.mark.parametrize(("kind", "double"), KINDS)
@pytest.mark.parametrize("shape", [(32, 64), (37, 33), (5, 7), (1, 1)])
def test_expanded_weights_are_near_the_weights(path, kind, double, shape):
    weight = weight_of(*shape)
    packed = pack(weight, kind, double)
    found = packed.expand(torch.float32)
    assert found.shape == shape
    torch.testing.assert_close(found, expand_reference(packed), rtol=1e-6, atol=1e-9)
    if shape[1] > 7:
        assert (found - weight).square().mean().sqrt() < ERROR[kind] * weight.square().mean().sqrt()


def test_sizes():
    weight = weight_of(256, 512)
    bits = {k: pack(weight, *k).nbytes() * 8 / weight.numel() for k in KINDS}
    assert bits["nf4", False] == pytest.approx(4.5)
    assert bits["nf4", True] == pytest.approx(4.127, abs=2e-3)
    assert bits["int8", False] == pytest.approx(8.0625)


def test_large_matrices_are_packed_in_parts_as_in_one(monkeypatch):
    from automodel.kernels import packed as module

    weight = weight_of(24, 64)
    whole = [pack(weight, *k) for k in KINDS]
    monkeypatch.setattr(module, "AT_ONCE", 256)
    for one, other in zip(whole, (pack(weight, *k) for k in KINDS), strict=True):
        assert all(torch.equal(t, other.tensors()[name]) for name, t in one.tensors().items())


def test_zeros_stay_zero():
    for kind, double in KINDS:
        assert not pack(torch.zeros(4, 64), kind, double).expand(torch.float32).any()


@pytest.mark.parametrize(("kind", "double"), KINDS)
def test_a_joined_product_expands_each_of_its_layers(kind, double):
    weights = [weight_of(8, 64), weight_of(4, 64) * 3]
    base = Expanding([pack(w, kind, double) for w in weights], torch.float32)
    expected = torch.cat([pack(w, kind, double).expand(torch.float32) for w in weights])
    x, dy = torch.randn(5, 64), torch.randn(5, 12)
    torch.testing.assert_close(base.times(x, torch.ones(12)), x @ expected.t() + 1.0)
    torch.testing.assert_close(base.back(dy), dy @ expected)
    torch.testing.assert_close(base.back(dy, torch.ones(5, 64)), dy @ expected + 1.0)
    assert isinstance(base.parts[0].to("cpu"), Packed)
