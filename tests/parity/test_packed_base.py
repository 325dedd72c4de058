"""Adapters beside weights in 4 and 8 bits: the plain step, the fused blocks and a base that is kept expanded compute
the same logits and gradients, in fp32 on the CPU."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from automodel.adapters.attach import attach, resolve, trained_tensors
from automodel.adapters.config import PeftConfig
from automodel.adapters.packed_linear import PackedLinear, Packing, pack_layers, packable
from automodel.config.errors import UserError
from automodel.kernels.packed import pack
from automodel.models.checkpointing import use_gradient_checkpointing
from automodel.models.forward import make_forward
from automodel.models.recompute import use_own_checkpoints
from automodel.tasks.registry import task_named
from parity.test_fused_adapters import assert_same, fused_of
from parity.test_fused_decoders import SIZE
from tiny_models import tiny

NF4 = Packing("nf4", double=True)


def packed_model(kind, task, packing, stock=None, **section):
    stock = deepcopy(stock) if stock is not None else tiny(kind, task, **SIZE)[1]
    adapter = resolve(PeftConfig(dim=4, alpha=8, **section), stock, task_named(task).head.adapter_type, "base")
    pack_layers(stock, packing, "cpu", torch.float32, adapter.saved)
    attach(stock, adapter)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, tensor in trained_tensors(stock).items():
            if name.endswith("lora_B"):
                tensor.normal_(std=0.1)
    return stock


@pytest.mark.parametrize("packing", [NF4, Packing("nf4"), Packing("fp4", double=True), Packing("int8")])
@pytest.mark.parametrize(("kind", "task"), [("qwen3", "causal-lm"), ("phi3", "text-classification")])
def test_packed_resident_and_fused_are_one(kind, task, packing):
    _, stock = tiny(kind, task, **SIZE)
    plain = packed_model(kind, task, packing, stock)
    assert sum(isinstance(m, PackedLinear) for m in plain.modules()) == len(packable(stock, ("score",)))
    fused, forward = fused_of(plain, task)
    assert_same(plain, fused, forward, task)
    resident = packed_model(kind, task, Packing(packing.kind, packing.double, resident=True), stock)
    assert not any(isinstance(m, PackedLinear) for m in resident.modules())
    plain.zero_grad(set_to_none=True)
    assert_same(plain, resident, make_forward(resident, task_named(task).head, "packed"), task)


def test_layers_without_adapters_are_packed_too_and_the_head_is_not():
    plain = packed_model("llama", "causal-lm", NF4, target_modules=("q_proj", "down_proj"))
    assert type(plain.lm_head) is nn.Linear
    assert isinstance(plain.model.layers[0].self_attn.k_proj, PackedLinear)
    assert_same(plain, *fused_of(plain, "causal-lm"), "causal-lm")


@pytest.mark.parametrize("offload", [False, True])
def test_recomputed_layers_expand_again(offload):
    plain = packed_model("qwen3", "causal-lm", NF4).train()
    ours, forward = fused_of(plain, "causal-lm")
    use_gradient_checkpointing(ours, "full")
    use_own_checkpoints(ours, offload)
    assert_same(plain, ours, forward, "causal-lm")


def test_encoders_have_packed_layers_as_well():
    _, stock = tiny("bert", "text-classification")
    model = packed_model("bert", "text-classification", NF4, stock)
    weight = stock.bert.encoder.layer[0].attention.self.query.weight.detach()
    found = model.bert.encoder.layer[0].attention.self.query.packed_base.packed.expand(torch.float32)
    assert torch.equal(found, pack(weight, "nf4").expand(torch.float32))
    assert type(model.classifier) is nn.Linear, "trained in full"
    ids = torch.randint(5, 90, (2, 9))
    model(input_ids=ids).logits.square().sum().backward()
    assert all(t.grad is not None and t.grad.abs().sum() > 0 for t in trained_tensors(model).values())


def test_nothing_to_pack_is_an_error():
    _, model = tiny("gpt2", "causal-lm")
    with pytest.raises(UserError, match="no linear layers that could be packed"):
        pack_layers(model, NF4, "cpu", torch.float32, ())
