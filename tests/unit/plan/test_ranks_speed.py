"""Several GPUs run the steps of one: captured and fused under ddp, fused under fsdp2; the plan says what and why."""

import dataclasses

import pytest

from automodel.data.config import DatasetConfig
from automodel.distributed.config import DistributedConfig
from automodel.distributed.layout import Layout
from automodel.models.config import ModelConfig
from automodel.plan.config import RunConfig, StepSchedulerConfig
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.tasks.registry import task_named

H200 = Hardware("cuda", "NVIDIA H200", 8, 140.0, True, True, 16)
CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)
LLAMA = ModelFacts(
    "llama", "llama", 1_240_000_000, True, "packs", can_fuse=True, decoder=True,
    fused_in_words="residual + RMSNorm, SwiGLU, rotation in place, joined query/key/value",
)  # fmt: skip
BERT = ModelFacts("bert", "bert", 110_000_000, True, "packs", can_fuse=True, fused_in_words="norms", dropout="dropout")
DATA = DataFacts(rows=1000, tokens=4_000_000, longest=4096, max_length=4096, has_validation=False)
EIGHT, SHARDS = Layout(replicas=8), Layout(shards=8, fsdp=True)


def plan_of(layout, model=LLAMA, hardware=H200, task="causal-lm", **sections):
    cfg = RunConfig(
        model=ModelConfig(pretrained_model_name_or_path="m"), dataset=DatasetConfig(path="data.csv"), **sections
    )
    return make_plan(cfg, task_named(task), hardware, model, DATA, layout=layout)


def line(plan, name):
    return next((d for d in plan.decisions if d.name == name), None)


def test_ddp_is_captured_and_fused():
    plan = plan_of(EIGHT)
    assert (plan.capture, plan.fused_kernels) == (True, True)
    assert "8 ranks sum flat gradients in fp32, the first while the last are made" in line(plan, "step").reason
    assert plan.late_update  # its gradients have fixed places whether they wait or not
    told = plan_of(EIGHT, distributed=DistributedConfig(reduce_dtype="torch.bfloat16"))
    assert "sum flat gradients in bfloat16" in line(told, "step").reason


def test_ranks_sum_whole_word_tables():
    assert plan_of(Layout(), BERT, task="text-classification").lazy_embeddings
    assert not plan_of(EIGHT, BERT, task="text-classification").lazy_embeddings


def test_accumulation_leaves_nothing_for_the_next_step():
    plan = plan_of(EIGHT, step_scheduler=StepSchedulerConfig(grad_acc_steps=4))
    assert plan.capture
    assert not plan.late_update


@pytest.mark.parametrize("trained", [0, 1_000_000])
def test_shards_are_fused_in_eager_steps(trained):
    plan = plan_of(SHARDS, dataclasses.replace(LLAMA, trained=trained))
    assert (plan.capture, plan.fused_kernels, plan.late_update, plan.lazy_embeddings) == (False, True, False, False)
    assert "gather" in line(plan, "step").reason
    assert "products layer by layer, weights being gathered" in line(plan, "kernels").reason


@pytest.mark.parametrize(
    ("layout", "model", "why"),
    [
        (
            dataclasses.replace(SHARDS, shards=4, tp=2),
            dataclasses.replace(LLAMA, head_words=128_256),
            "tp_size and cp_size cut",
        ),
        (dataclasses.replace(SHARDS, shards=4, cp=2), LLAMA, "tp_size and cp_size cut"),
        (SHARDS, BERT, "dropout: fused dropout is drawn from a counter"),
        (SHARDS, dataclasses.replace(BERT, dropout=None), "encoders need flat parameters; strategy: ddp has them"),
        (SHARDS, dataclasses.replace(LLAMA, can_fuse=False), "no fused blocks for this llama"),
    ],
)
def test_where_shards_keep_stock_blocks_the_plan_says_why(layout, model, why):
    plan = plan_of(layout, model)
    assert not plan.fused_kernels
    assert why in line(plan, "kernels").reason


def test_nothing_changes_without_a_gpu():
    for layout in (EIGHT, SHARDS):
        plan = plan_of(layout, hardware=CPU)
        assert (plan.capture, plan.fused_kernels) == (False, False)
        assert line(plan, "kernels") is None
