"""Whether logits are stored, and what the plan says about it."""

import pytest

from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig
from automodel.models.config import ModelConfig
from automodel.plan.config import RunConfig
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.registry import task_named

CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)
H200 = Hardware("cuda", "NVIDIA H200", 1, 140.0, True, True, 16)
LLAMA = ModelFacts("llama", "llama", 1_236_000_000, True, "packs", head_words=128_256)
MAMBA = ModelFacts("mamba", "mamba", 130_000_000, False, "carries a state")
DATA = DataFacts(rows=1000, tokens=4_096_000, longest=4096, max_length=4096, has_validation=False)


def plan_for(hardware=H200, model=LLAMA, task="causal-lm", liger=None, **loss):
    cfg = RunConfig(
        model=ModelConfig(pretrained_model_name_or_path="m", use_liger_kernel=liger),
        dataset=DatasetConfig(path="data.jsonl"),
        loss_fn=LossConfig(**loss),
    )
    return make_plan(cfg, task_named(task), hardware, model, DATA)


def loss_line(plan):
    return next((d.value, d.reason) for d in plan.decisions if d.name == "loss")


def test_a_plain_head_is_part_of_the_loss():
    plan = plan_for()  # 8 × 4096 tokens
    assert plan.fused_loss
    value, reason = loss_line(plan)
    assert value == "fused linear + cross-entropy"
    assert reason == "4,096 rows at a time, logits are never stored: saves up to 53.8 GiB"
    assert plan_for(CPU).fused_loss


def test_what_is_not_stored_is_not_counted():
    import dataclasses

    from automodel.plan.memory import ModelShape

    fields = {f.name: 2 for f in dataclasses.fields(ModelShape) if f.default is dataclasses.MISSING}
    model = dataclasses.replace(LLAMA, shape=ModelShape(**{**fields, "vocabulary": 128_256}))
    difference = plan_for(model=model, fused=False).memory_gib - plan_for(model=model).memory_gib
    assert difference == pytest.approx(53.8, abs=0.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fused": False}, "loss_fn.fused is false"),
        ({"liger": False}, "model.use_liger_kernel is false"),
        ({"model": MAMBA}, "the head of mamba is not known to be a plain product"),
    ],
)
def test_stored_logits_have_a_reason(settings, words):
    plan = plan_for(**settings)
    assert not plan.fused_loss
    value, reason = loss_line(plan)
    assert value == "cross-entropy over stored logits"
    assert words in reason


def test_asking_wins_over_liger():
    assert plan_for(liger=False, fused=True).fused_loss


def test_what_cannot_be_had_is_refused():
    with pytest.raises(UserError, match="the head of mamba"):
        plan_for(model=MAMBA, fused=True)
    with pytest.raises(UserError, match=r"loss_fn\.fused belongs to causal language models"):
        plan_for(task="text-classification", fused=True)


def test_other_tasks_have_no_line():
    plan = plan_for(task="text-classification")
    assert not plan.fused_loss
    assert not any(d.name == "loss" for d in plan.decisions)


def test_adjustments_are_told():
    lines = [d for d in plan_for(z_loss=1e-4, label_smoothing=0.1).decisions if d.name == "loss"]
    assert "label smoothing 0.1 and z-loss 0.0001" in [d.value for d in lines]
