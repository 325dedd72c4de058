"""The reference's keys for precision (`torch_dtype`, `bf16`, `fp16`, `tf32`) and what the plan makes of them."""

import pytest

from automodel.data.config import DatasetConfig
from automodel.models.config import ModelConfig
from automodel.plan.check import check_run
from automodel.plan.config import RunConfig, TrainingOptimizations
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.tasks.registry import TEXT_CLASSIFICATION

CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)
H200 = Hardware("cuda", "NVIDIA H200", 1, 140.0, True, True, 16)
TURING = Hardware("cuda", "Quadro RTX 6000", 1, 24.0, False, False, 8)
BERT = ModelFacts("bert", "bert", 110_000_000, True, "through the attention interface", can_fuse=True)
DATA = DataFacts(rows=1000, tokens=241_000, longest=512, max_length=512, has_validation=True)


def config(dtype: str | None = None, **options) -> RunConfig:
    return RunConfig(
        model=ModelConfig(pretrained_model_name_or_path="bert", torch_dtype=dtype),
        dataset=DatasetConfig(path="data.csv"),
        training_optimizations=TrainingOptimizations(**options),
    )


def plan_for(cfg: RunConfig, hardware: Hardware):
    return make_plan(cfg, TEXT_CLASSIFICATION, hardware, BERT, DATA)


@pytest.mark.parametrize(
    ("dtype", "options", "hardware", "expected"),
    [
        (None, {}, H200, "bf16"),
        (None, {}, TURING, "fp32"),
        (None, {"bf16": True}, H200, "bf16"),
        (None, {"bf16": False}, H200, "fp32"),
        (None, {"fp16": True}, H200, "fp16"),
        (None, {"fp16": True}, TURING, "fp16"),
        (None, {"fp16": True, "bf16": False}, H200, "fp16"),
        (None, {"fp16": False, "bf16": True, "tf32": True}, H200, "bf16"),
        (None, {"tf32": True}, H200, "bf16"),
        (None, {"tf32": True, "bf16": False}, H200, "tf32"),
        (None, {"tf32": True, "precision": "fp32"}, H200, "tf32"),
        (None, {"tf32": True}, CPU, "fp32"),
        (None, {"precision": "tf32"}, H200, "tf32"),
        (None, {"precision": "bf16-pure"}, H200, "bf16-pure"),
        ("torch.float32", {}, H200, "fp32"),
        ("float32", {"tf32": True}, H200, "tf32"),
        ("torch.bfloat16", {}, H200, "bf16"),
        ("bfloat16", {"precision": "bf16-pure"}, H200, "bf16-pure"),
        ("float16", {}, H200, "fp16"),
        ("auto", {}, H200, "bf16"),
        ("bfloat16", {"fp16": False, "tf32": False}, H200, "bf16"),
        ("float32", {"bf16": False}, H200, "fp32"),
    ],
)
def test_what_the_keys_mean(dtype, options, hardware, expected):
    cfg = config(dtype, **options)
    assert check_run(cfg) == []
    assert plan_for(cfg, hardware).precision == expected


def test_the_plan_names_the_key():
    def line(cfg):
        return next(d.reason for d in plan_for(cfg, H200).decisions if d.name == "precision")

    assert line(config(fp16=True)) == "training_optimizations.fp16 asks for it"
    assert "training_optimizations.tf32" in line(config("float32", tf32=True))
    assert "model.torch_dtype" in line(config("float16"))


@pytest.mark.parametrize("options", [{}, {"bf16": True}])
def test_tf32_without_a_gpu_is_answered(options):
    told = [(d.value, d.reason) for d in plan_for(config(tf32=True, **options), CPU).decisions if d.name == "tf32"]
    assert told == [("off", "Test CPU has no TF32")]


@pytest.mark.parametrize(
    ("dtype", "options", "path"),
    [
        (None, {"precision": "tf32", "tf32": False}, "training_optimizations.precision"),
        (None, {"precision": "bf16-pure", "bf16": False}, "training_optimizations.precision"),
        (None, {"precision": "fp16", "fp16": False}, "training_optimizations.precision"),
        (None, {"precision": "tf32", "bf16": True}, "training_optimizations.precision"),
        (None, {"bf16": True, "fp16": True}, "training_optimizations.fp16"),
        ("bfloat16", {"fp16": True}, "model.torch_dtype"),
        ("float16", {"precision": "tf32"}, "model.torch_dtype"),
        ("bf16", {"bf16": False}, "model.torch_dtype"),
        ("torch.float16", {"fp16": False}, "model.torch_dtype"),
        ("bf16", {"precision": "bf16", "bf16": False}, "training_optimizations.precision"),
    ],
)
def test_contradictions_are_named(dtype, options, path):
    assert [problem.path for problem in check_run(config(dtype, **options))] == [path]


def test_a_gpu_without_flash_attention_takes_stock_blocks():
    plan = plan_for(config(fp16=True), TURING)
    assert plan.capture
    assert not plan.fused_kernels
    assert "Ampere" in next(d.reason for d in plan.decisions if d.name == "kernels")
