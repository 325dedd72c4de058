"""The adapter's product against its plain reference: values, gradients, what is kept, dropout, dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from automodel.adapters.lora import LoraLinear, lora_linear, lora_linear_reference

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def tensors(dtype, bias=True):
    torch.manual_seed(0)
    shapes = {"x": (3, 5, 8), "a": (4, 8), "b": (6, 4)}
    learned = {name: torch.randn(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()}
    return learned, torch.randn(6, 8, dtype=dtype), torch.randn(6, dtype=dtype) if bias else None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_are_the_references(dtype, bias):
    found = []
    for function in (lora_linear, lora_linear_reference):
        learned, weight, offset = tensors(dtype, bias)
        y = function(learned["x"], weight, offset, learned["a"], learned["b"], 0.7)
        y.square().sum().backward()
        found.append((y, *(learned[name].grad for name in ("x", "a", "b"))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype] * 10, atol=TOLERANCE[dtype] * 100)


def test_a_frozen_input_gets_no_gradient():
    learned, weight, bias = tensors(torch.float32)
    x = learned["x"].detach()
    lora_linear(x, weight, bias, learned["a"], learned["b"], 1.0).sum().backward()
    assert x.grad is None
    assert learned["a"].grad is not None


def test_the_input_is_kept_once_and_the_base_product_keeps_nothing():
    learned, weight, bias = tensors(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lora_linear(learned["x"], weight, bias, learned["a"], learned["b"], 1.0)
    sizes = sorted(t.numel() for t in kept if t.data_ptr() != weight.data_ptr())
    assert sizes == sorted([15 * 8, 15 * 4, 4 * 8, 6 * 4]), "x, x Aᵀ, A and B"


def test_dropout_touches_the_adapter_alone_and_its_gradient_follows_the_mask():
    learned, weight, _ = tensors(torch.float64, bias=False)
    torch.manual_seed(3)
    y = lora_linear(learned["x"], weight, None, learned["a"], learned["b"], 1.0, dropout=0.5)
    y.sum().backward()
    x = learned["x"].detach().clone().requires_grad_()
    torch.manual_seed(3)
    dropped = nn.functional.dropout(x.reshape(-1, 8), 0.5).view_as(x)
    theirs = x @ weight.t() + dropped @ learned["a"].detach().t() @ learned["b"].detach().t()
    theirs.sum().backward()
    torch.testing.assert_close(y, theirs)
    torch.testing.assert_close(learned["x"].grad, x.grad)


def test_under_autocast_masters_stay_fp32():
    layer = LoraLinear(nn.Linear(8, 6), rank=4, scale=2.0, dropout=0.0)
    layer.draw(torch.Generator().manual_seed(1))
    layer.weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(3, 8))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.lora_B.grad is not None
    assert layer.lora_B.grad.dtype == torch.float32
    assert layer.weight.grad is None


def test_a_transposed_layer_of_gpt2_merges_to_the_same_outputs():
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    base = Conv1D(6, 8)
    layer = LoraLinear(base, rank=2, scale=0.5, dropout=0.0)
    layer.draw(torch.Generator().manual_seed(1))
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), base(x))  # B is zero: the adapter begins as nothing
    nn.init.normal_(layer.lora_B)
    adapted = layer(x)
    assert not torch.allclose(adapted, base(x))
    base.weight.data.copy_(layer.merged())
    torch.testing.assert_close(base(x), adapted, rtol=1e-5, atol=1e-6)
