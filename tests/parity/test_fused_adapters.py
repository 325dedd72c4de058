"""Fused decoder blocks with adapters against the plain modules with the same adapters, which `test_peft.py` holds to
the real PEFT: logits and gradients in fp32 on the CPU, for every family, and what stays frozen stays frozen."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from automodel.adapters.attach import attach, resolve, trained_tensors
from automodel.adapters.config import PeftConfig
from automodel.data.batch import IGNORE
from automodel.kernels import fp8_linear
from automodel.kernels.flat_parameters import FlatParameters
from automodel.models.block_support import can_fuse_adapters
from automodel.models.checkpointing import use_gradient_checkpointing
from automodel.models.decoder_parts import DECODERS
from automodel.models.families import packing_support
from automodel.models.forward import make_forward
from automodel.models.fp8 import use_fp8
from automodel.models.fuse import fuse, will_fuse
from automodel.models.recompute import use_own_checkpoints
from automodel.models.task_head import NEXT_TOKEN
from automodel.optim.build import parameter_groups
from automodel.optim.config import OptimizerConfig
from automodel.tasks.registry import task_named
from parity.test_fused_decoders import SIZE
from parity.test_packed_families import documents, packed
from tiny_models import tiny

CLOSE = {"rtol": 1e-4, "atol": 2e-6}


def adapted(kind, task, size=None, **section):
    _, model = tiny(kind, task, **SIZE, **(size or {}))
    attach(
        model,
        resolve(PeftConfig(**{"dim": 4, "alpha": 8, **section}), model, task_named(task).head.adapter_type, "base"),
    )
    torch.manual_seed(5)
    with torch.no_grad():
        for name, tensor in trained_tensors(model).items():
            if name.endswith("lora_B"):
                tensor.normal_(std=0.1)
    return model


def fused_of(plain, task):
    ours = deepcopy(plain)
    FlatParameters(parameter_groups(ours, OptimizerConfig()))
    assert will_fuse(ours)
    assert can_fuse_adapters(ours.config, ours._automodel_adapter)
    assert fuse(ours, torch.zeros(1, dtype=torch.int64), None, 24) == ours.config.num_hidden_layers
    return ours, make_forward(ours, task_named(task).head, "packed", swapped=True)


def assert_same(plain, ours, forward, task):
    batch = packed(documents(0), task, packing_support(ours.config, task_named(task).head).pooling)
    found = []
    for model, run in ((plain, make_forward(plain, task_named(task).head, "packed")), (ours, forward)):
        logits = run(batch)[batch.labels_R != IGNORE]  # an unused slot of the batch reads anything
        logits.square().sum().backward()
        found.append((logits, {name: t.grad for name, t in trained_tensors(model).items()}))
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    torch.testing.assert_close(found[1][0], found[0][0], **CLOSE)
    assert found[0][1].keys() == found[1][1].keys()
    for name, theirs in found[0][1].items():
        allowed = 1e-5 * float(theirs.abs().max()) + 1e-7
        torch.testing.assert_close(found[1][1][name], theirs, rtol=1e-3, atol=allowed, msg=name)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("task", ["causal-lm", "text-classification"])
def test_every_family_with_adapters_on_all_layers(kind, task):
    plain = adapted(kind, task)
    assert_same(plain, *fused_of(plain, task), task)


@pytest.mark.parametrize(
    "section",
    [
        {"target_modules": ("q_proj", "v_proj")},
        {"target_modules": ("gate_proj", "down_proj"), "use_rslora": True},
        {"exclude_modules": ("k_proj", "down_proj")},
    ],
)
def test_layers_without_adapters_are_frozen_products(section):
    plain = adapted("qwen3", "causal-lm", **section)
    assert_same(plain, *fused_of(plain, "causal-lm"), "causal-lm")


def test_embeddings_and_head_may_be_trained_in_full_beside_the_adapters():
    plain = adapted("llama", "causal-lm", modules_to_save=("embed_tokens", "lm_head"))
    assert sum(not name.endswith(("lora_A", "lora_B")) for name in trained_tensors(plain)) == 2
    assert_same(plain, *fused_of(plain, "causal-lm"), "causal-lm")


@pytest.mark.parametrize("section", [{}, {"exclude_modules": ("up_proj", "v_proj")}])
@pytest.mark.parametrize(("dim", "held"), [(8, 6), (3, 0)])
def test_adapters_may_be_inside_the_products_or_apart(section, dim, held):
    """Inside: B of query, key, value, gate and up, A of down; apart where ranks are no whole 16 bytes."""
    plain = adapted("qwen3", "causal-lm", dim=dim, **section)
    ours, forward = fused_of(plain, "causal-lm")
    assert len(ours.model.layers[0].forward.held) == held
    assert_same(plain, ours, forward, "causal-lm")


def test_frozen_biases_are_added():
    plain = adapted("llama", "causal-lm", size={"attention_bias": True, "mlp_bias": True})
    assert_same(plain, *fused_of(plain, "causal-lm"), "causal-lm")


@pytest.mark.parametrize("offload", [False, True])
def test_layers_that_are_computed_again_learn_the_same(offload):
    plain = adapted("qwen3", "causal-lm").train()
    ours, forward = fused_of(plain, "causal-lm")
    use_gradient_checkpointing(ours, "full")
    use_own_checkpoints(ours, offload)
    assert_same(plain, ours, forward, "causal-lm")


def test_modules_trained_in_full_inside_the_layers_keep_stock_blocks():
    model = adapted("llama", "causal-lm", modules_to_save=("layers.0.input_layernorm",))
    assert not will_fuse(model)
    assert not can_fuse_adapters(model.config, model._automodel_adapter)
    frozen = adapted("llama", "causal-lm", target_modules=("q_proj",))
    del frozen._automodel_adapter
    assert not will_fuse(frozen), "a model that somebody froze is not an adapted one"


def test_dropout_reaches_the_adapters_alone():
    plain = adapted("llama", "causal-lm", dropout=0.5).train()
    ours, forward = fused_of(plain, "causal-lm")
    batch = packed(documents(0), "causal-lm", None)
    torch.manual_seed(0)
    one, two = forward(batch), forward(batch)
    assert not torch.equal(one, two)
    ours.eval()
    with torch.no_grad():
        torch.testing.assert_close(forward(batch), make_forward(plain.eval(), NEXT_TOKEN, "packed")(batch), **CLOSE)
    one.square().sum().backward()
    assert all(t.grad is not None for t in trained_tensors(ours).values())


def test_an_fp8_base_is_near_and_only_the_products_that_pay_are_rounded(monkeypatch):
    monkeypatch.setattr(fp8_linear, "SMALLEST_WIDTH", 64)
    plain = adapted("qwen3", "causal-lm")
    ours, forward = fused_of(plain, "causal-lm")
    chosen = use_fp8(ours, ["down_proj"])
    assert [p.outputs for p in chosen] == [128, 64, 192] * 2
    batch = packed(documents(0), "causal-lm", None)
    exact, rounded = make_forward(plain, NEXT_TOKEN, "packed")(batch), forward(batch)
    assert 1e-4 < (exact - rounded).norm() / exact.norm() < 0.1
    rounded.square().sum().backward()
    assert all(t.grad is not None for t in trained_tensors(ours).values())
