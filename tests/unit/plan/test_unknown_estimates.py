"""No estimate of the plan stops a run: what a config does not say in the usual form is unknown, with a reason."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from transformers import Gemma3nTextConfig

from architectures.tiny import TASKS, default_config, tiny_config
from automodel.data.config import DatasetConfig
from automodel.models.config import ModelConfig
from automodel.plan import fitting, kernels_ahead
from automodel.plan.compile_record import read_compile_facts
from automodel.plan.config import RunConfig
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.plan.memory import Setting, estimate, shape_or_why
from automodel.tasks.registry import CAUSAL_LM

INVALID = {"gemma4_assistant"}
"""Types whose default config is not valid in transformers itself."""
KINDS = sorted({kind for _, names in TASKS.values() for kind in names} - INVALID)
SETTING = Setting(
    precision="bf16", captured=True, fused=True, kind=None, checkpointing="selective", tokens=512, rows=64,
    trained=1000, shards=2,
)  # fmt: skip
CPU = Hardware(device="cpu", name="CPU", gpus=0, memory_gib=16.0, bf16=False, tf32=False, cores=2)
RUN = RunConfig(model=ModelConfig(pretrained_model_name_or_path="m"), dataset=DatasetConfig(path="d"))
DATA = DataFacts(rows=100, tokens=2000, longest=30, max_length=32, has_validation=False)


def line_of(plan, name):
    return next(d for d in plan.decisions if d.name == name)


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_has_an_estimate_or_a_reason(kind):
    shape, why = shape_or_why(default_config(kind))
    assert (shape is None) == bool(why)
    assert estimate(shape, 10**6, SETTING).total > 0


def test_sizes_that_differ_by_layer_are_the_largest():
    config = Gemma3nTextConfig(
        num_hidden_layers=4, intermediate_size=[32, 64, 48, 48], num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    shape, why = shape_or_why(config)
    assert (shape.inner, why) == (64, "")


@pytest.mark.parametrize("value", [None, "wide", [], [None], {"a": 1}, 0, -4, 1.5, [16, 32]], ids=str)
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"])
def test_no_form_of_a_size_raises(name, value):
    config = SimpleNamespace(**tiny_config("llama").to_dict())
    setattr(config, name, value)
    shape, why = shape_or_why(config)
    assert (shape is None) == bool(why)
    facts = read_compile_facts(RUN, tiny_config("llama"), "cuda", "GPU", None)
    assert isinstance(facts.width, int)
    estimate(shape, 1000, SETTING)


def test_the_plan_says_why_memory_is_not_known():
    shape, why = shape_or_why(SimpleNamespace(model_type="odd", hidden_size=[8, 16], num_hidden_layers=2))
    facts = ModelFacts("m", "odd", 1000, False, "is odd", shape=shape, no_shape=why)
    reason = line_of(make_plan(RUN, CAUSAL_LM, CPU, facts, DATA), "memory").reason
    assert "activations not known, because the config of odd does not say its heads by a usual name" in reason


def test_an_estimate_that_fails_does_not_end_the_plan(monkeypatch):
    whole, _ = shape_or_why(tiny_config("llama"))

    def broken(shape, parameters, setting):
        if shape is not None:
            raise ZeroDivisionError
        return estimate(shape, parameters, setting)

    monkeypatch.setattr(fitting, "estimate", broken)
    facts = ModelFacts("m", "llama", 1000, True, "is known", shape=whole)
    plan = make_plan(RUN, CAUSAL_LM, CPU, facts, DATA)
    assert "activations not known, because the sizes in the config of llama do not fit together" in (
        line_of(plan, "memory").reason
    )


def test_a_config_of_another_form_compiles_nothing_ahead(tmp_path, monkeypatch):
    config = copy.deepcopy(tiny_config("llama").to_dict()) | {"hidden_size": [8, 16], "num_attention_heads": "many"}
    monkeypatch.setattr(kernels_ahead, "model_config", lambda cfg: config)
    monkeypatch.setattr(kernels_ahead.ahead, "why_never", lambda: None)
    assert "unknown, because" in kernels_ahead.compile_kernels_ahead(RUN)
