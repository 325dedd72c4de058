"""FP8 under an adapter is tried on the first batch, and left out where it changes the loss."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from automodel.engine import fp8_guard
from automodel.engine.fp8_guard import guarded
from automodel.engine.prepare import Prepared
from automodel.kernels import fp8_linear
from automodel.models.families import packing_support
from automodel.models.forward import stock_attention
from automodel.models.fp8 import use_fp8
from automodel.models.task_head import NEXT_TOKEN
from automodel.plan.plan import Decision, Plan
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.registry import CAUSAL_LM
from parity.test_fused_adapters import adapted, fused_of
from parity.test_packed_families import documents, packed


def prepared_like(fp8=True, adapter=True):
    plan = object.__new__(Plan)
    values = {"fp8": fp8, "device": "cpu", "decisions": (Decision("task", "x", ""), Decision("fp8", "6 of 8", "asked"))}
    for name in Plan.__dataclass_fields__:
        object.__setattr__(plan, name, values.get(name))
    made = object.__new__(Prepared)
    for name in Prepared.__dataclass_fields__:
        object.__setattr__(made, name, {"plan": plan, "adapter": object() if adapter else None}.get(name))
    return made


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.setattr(fp8_linear, "SMALLEST_WIDTH", 64)
    model, forward = fused_of(adapted("qwen3", "causal-lm"), "causal-lm")
    assert use_fp8(model)
    step = SimpleNamespace(forward=forward, loss=CAUSAL_LM.loss(LossConfig(), None, None))
    return model, step, packed(documents(0), "causal-lm", packing_support(model.config, NEXT_TOKEN).pooling)


def test_a_small_difference_is_told_and_fp8_stays(parts):
    model, step, batch = parts
    after = guarded(prepared_like(), model, step, batch)
    assert after.plan.fp8 is True
    line = after.plan.decisions[1]
    assert line.value == "6 of 8"
    assert "the first batch has loss" in line.reason
    assert model.model.layers[0].forward.fp8_held
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert weight.dtype == torch.float8_e4m3fn, "the wide weights are gone"
    with torch.no_grad(), stock_attention(model):
        ids = batch.input_ids_T[:7][None]
        exact, rounded = parts_before(ids), model(input_ids=ids).logits
    assert 1e-4 < (exact - rounded).norm() / exact.norm() < 0.1, "stock blocks compute with what is left"


def parts_before(ids):
    return adapted("qwen3", "causal-lm")(input_ids=ids).logits


def test_a_large_one_turns_it_off(parts, monkeypatch):
    model, step, batch = parts
    monkeypatch.setattr(fp8_guard, "ALLOWED", 1e-9)
    after = guarded(prepared_like(), model, step, batch)
    assert after.plan.fp8 is False
    assert after.plan.decisions[1].value == "off"
    assert "in bf16: more than" in after.plan.decisions[1].reason
    assert not model.model.layers[0].forward.fp8_held
    with torch.no_grad():
        assert torch.isfinite(step.forward(batch)).all()


def test_nothing_is_tried_without_an_adapter_or_without_fp8(parts):
    model, _, batch = parts
    for made in (prepared_like(fp8=False), prepared_like(adapter=False)):
        assert guarded(made, model, None, batch) is made
