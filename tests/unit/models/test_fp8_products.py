"""The products of a model that go to FP8, in fused and in stock blocks, and what that does to the gradients."""

import pytest
import torch
import torch.nn.functional as F

from automodel.kernels import fp8_linear
from automodel.kernels.flat_parameters import FlatParameters
from automodel.models.forward import make_forward
from automodel.models.fp8 import Fp8Linear, products, use_fp8
from automodel.models.fuse import fuse, stock_blocks
from automodel.models.task_head import NEXT_TOKEN
from automodel.optim.build import parameter_groups
from automodel.optim.config import OptimizerConfig
from parity.test_fused_decoders import SIZE
from parity.test_packed_families import documents, packed
from tiny_models import tiny


@pytest.fixture
def small_ones_pay(monkeypatch):
    monkeypatch.setattr(fp8_linear, "SMALLEST_WIDTH", 64)


def make(kind, fused=True, dtype=torch.bfloat16):
    torch.manual_seed(0)
    _, model = tiny(kind, "causal-lm", **SIZE)
    model = model.to(dtype).train()
    FlatParameters(parameter_groups(model, OptimizerConfig()))
    if fused:
        assert fuse(model, torch.zeros(1, dtype=torch.int64), None, 24)
    return model, make_forward(model, NEXT_TOKEN, "packed", swapped=fused)


def loss_and_gradients(model, forward):
    batch = packed(documents(0), "causal-lm", None)
    loss = F.cross_entropy(forward(batch).float(), batch.labels_R)
    loss.backward()
    return loss.item(), {name: p.grad.float() for name, p in model.named_parameters()}


def test_products_of_fused_blocks():
    model, _ = make("qwen3")
    found = products(model, fused=True)
    assert [str(p) for p in found[:4]] == ["64→128", "64→64", "64→192", "96→64"]
    assert len(found) == 8
    assert found[0].names == tuple(f"model.layers.0.self_attn.{n}_proj" for n in "qkv")
    assert found[0].listed(["v_proj"])
    assert not found[0].listed(["down_proj"])
    assert not any(p.pays for p in found)


def test_products_of_stock_blocks_leave_the_head_alone():
    model, _ = make("qwen3", fused=False)
    names = [name for p in products(model, fused=False) for name in p.names]
    assert len(names) == 14
    assert "lm_head" not in names


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["llama", "phi3", "olmo2"])
def test_gradients_are_close_to_bf16s(small_ones_pay, kind, fused):
    plain, exact = loss_and_gradients(*make(kind, fused))
    model, forward = make(kind, fused)
    chosen = use_fp8(model)
    assert chosen
    loss, gradients = loss_and_gradients(model, forward)
    assert loss == pytest.approx(plain, rel=0.02)
    assert loss != plain
    for name, gradient in gradients.items():
        error = (gradient - exact[name]).norm() / exact[name].norm().clamp(min=1e-6)
        assert error < 0.3, name
    total = torch.cat([g.flatten() for g in gradients.values()]), torch.cat([g.flatten() for g in exact.values()])
    assert F.cosine_similarity(*total, dim=0) > 0.98


def test_listed_layers_stay(small_ones_pay):
    model, _ = make("llama")
    chosen = use_fp8(model, ["down_proj", "layers.0."])
    assert [p.names[0].rpartition(".")[2] for p in chosen] == ["q_proj", "o_proj", "gate_proj"]
    assert id(model.model.layers[1].mlp.down_proj) not in model.model.layers[1].forward.fp8
    assert id(model.model.layers[1].mlp.up_proj) in model.model.layers[1].forward.fp8


def test_the_stock_code_comes_back(small_ones_pay):
    model, _ = make("llama", fused=False)
    use_fp8(model)
    linear = model.model.layers[0].mlp.up_proj
    assert isinstance(linear.forward, Fp8Linear)
    with stock_blocks(model):
        assert "forward" not in linear.__dict__
    assert isinstance(linear.forward, Fp8Linear)
