"""Each decision of the plan, and the reason a person reads."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from automodel.config.errors import UserError
from automodel.data.config import DataloaderConfig, DatasetConfig, PackedSequenceConfig
from automodel.models.config import ModelConfig
from automodel.plan.config import CompileConfig, RunConfig, StepSchedulerConfig, TrainingOptimizations
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware, read_hardware
from automodel.tasks.registry import TEXT_CLASSIFICATION

CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)
H200 = Hardware("cuda", "NVIDIA H200", 1, 140.0, True, True, 16)
TURING = Hardware("cuda", "Quadro RTX 6000", 1, 24.0, False, False, 8)
BERT = ModelFacts("bert", "bert", 110_000_000, True, "attention goes through the attention interface")
T5 = ModelFacts("t5", "t5", 60_000_000, False, "relative position bias")
DATA = DataFacts(rows=1000, tokens=241_000, longest=512, max_length=512, has_validation=True)


def config(**sections) -> RunConfig:
    sections.setdefault("model", ModelConfig(pretrained_model_name_or_path="bert"))
    return RunConfig(dataset=DatasetConfig(path="data.csv"), **sections)


def plan_for(cfg=None, hardware=CPU, model=BERT, data=DATA):
    return make_plan(cfg or config(), TEXT_CLASSIFICATION, hardware, model, data)


def reason(plan, name):
    return next(d.reason for d in plan.decisions if d.name == name)


def test_what_is_long_is_split_or_cut():
    assert reason(plan_for(), "data").endswith("cut at 512")
    assert reason(plan_for(data=dataclasses.replace(DATA, splits=True)), "data").endswith("split at 512")


def test_defaults_on_the_cpu():
    plan = plan_for()
    assert (plan.precision, plan.path, plan.bucket_tokens) == ("fp32", "packed", 1)
    assert (plan.micro_batch_size, plan.grad_acc_steps, plan.steps_per_epoch, plan.total_steps) == (8, 1, 125, 375)
    assert plan.val_every_steps == 125
    assert "bf16 was not measured" in reason(plan, "precision")
    assert not plan.pin_memory


def test_bf16_that_is_turned_off_is_not_called_missing():
    off = config(training_optimizations=TrainingOptimizations(bf16=False))
    for hardware in (CPU, dataclasses.replace(CPU, bf16=True), H200):
        assert reason(plan_for(off, hardware), "precision") == "bf16 is turned off"


def test_defaults_on_a_modern_gpu():
    plan = plan_for(hardware=H200)
    assert (plan.precision, plan.bucket_tokens, plan.capture) == ("bf16", 512, True)
    assert (plan.num_workers, plan.pin_memory) == (0, False)  # the main process is idle, the step has its own buffers
    assert "fp32 master weights" in reason(plan, "precision")


@pytest.mark.parametrize(
    ("scheduler", "batch", "expected"),
    [
        (StepSchedulerConfig(max_steps=50), 8, (8, 1, 50)),
        (StepSchedulerConfig(global_batch_size=32), 8, (8, 4, 3 * 32)),
        (StepSchedulerConfig(grad_acc_steps=4, num_epochs=1), 8, (8, 4, 32)),
        (StepSchedulerConfig(local_batch_size=4, global_batch_size=8, num_epochs=1), None, (4, 2, 125)),
        (StepSchedulerConfig(max_steps=10_000, num_epochs=2), 8, (8, 1, 250)),
    ],
)
def test_batches_and_steps(scheduler, batch, expected):
    plan = plan_for(config(step_scheduler=scheduler, dataloader=DataloaderConfig(batch_size=batch)))
    assert (plan.micro_batch_size, plan.grad_acc_steps, plan.total_steps) == expected


def test_torch_dtype_bf16_keeps_fp32_masters():
    cfg = config(model=ModelConfig(pretrained_model_name_or_path="bert", torch_dtype="torch.bfloat16"))
    plan = plan_for(cfg, H200)
    assert plan.precision == "bf16"
    assert "master weights and optimizer states stay fp32" in reason(plan, "precision")
    assert "was not measured" in reason(plan_for(cfg, CPU), "precision")


def test_padded_path_says_why():
    plan = plan_for(model=T5)
    assert plan.path == "padded"
    assert "relative position bias" in reason(plan, "padding")
    assert "similar lengths" in reason(plan, "padding")
    forced = plan_for(config(packed_sequence=PackedSequenceConfig(enabled=False)))
    assert "packed_sequence.enabled is false" in reason(forced, "padding")


def test_compile_asked_on_the_cpu_is_mapped_with_a_line():
    plan = plan_for(config(compile=CompileConfig(enabled=True)))
    assert plan.compile is False
    assert "asked for" in reason(plan, "compile")


@pytest.mark.parametrize(
    ("cfg", "hardware", "model", "message"),
    [
        (config(packed_sequence=PackedSequenceConfig(enabled=True)), CPU, T5, "t5 cannot be packed: relative position"),
        (config(training_optimizations=TrainingOptimizations(bf16=True)), TURING, BERT, "has no native bf16"),
        (config(training_optimizations=TrainingOptimizations(precision="fp16")), CPU, BERT, "fp16, which needs a GPU"),
        (config(training_optimizations=TrainingOptimizations(precision="tf32")), CPU, BERT, "Ampere or newer"),
        (
            config(
                dataloader=DataloaderConfig(batch_size=512, drop_last=True),
                step_scheduler=StepSchedulerConfig(grad_acc_steps=4),
            ),
            CPU,
            BERT,
            "drop_last drops everything",
        ),
        (
            config(dataloader=DataloaderConfig(batch_size=8), step_scheduler=StepSchedulerConfig(global_batch_size=12)),
            CPU,
            BERT,
            "not a multiple of the micro-batch of 8",
        ),
    ],
)
def test_impossible_wishes_are_refused_with_the_fix(cfg, hardware, model, message):
    with pytest.raises(UserError, match=message):
        plan_for(cfg, hardware, model)


def test_buckets_follow_the_length_of_the_run():
    short = plan_for(hardware=H200)
    long = plan_for(config(step_scheduler=StepSchedulerConfig(max_steps=100_000)), H200)
    assert short.bucket_tokens == 512
    assert long.bucket_tokens <= 64
    assert "dummy tokens" in reason(long, "buckets")
    asked = config(packed_sequence=PackedSequenceConfig(bucket_tokens=256))
    assert plan_for(asked, H200).bucket_tokens == 256
    assert plan_for(asked, CPU).bucket_tokens == 256


def test_the_last_block_of_a_classifier_is_pooled_where_it_can_be():
    poolable = dataclasses.replace(BERT, can_pool=True, can_pool_fused=True, can_fuse=True, pooled_saving=10 / 12 / 6)
    plan = plan_for(model=poolable)
    assert plan.pooled_last_block
    assert "saves 14%" in reason(plan, "last layer")
    assert not plan_for().pooled_last_block
    assert plan_for(hardware=H200, model=poolable).pooled_last_block
    only_fused = dataclasses.replace(poolable, can_pool=False)  # ModernBERT
    assert plan_for(hardware=H200, model=only_fused).pooled_last_block
    assert not plan_for(model=only_fused).pooled_last_block
    stock = config(training_optimizations=TrainingOptimizations(precision="fp32"))
    assert not plan_for(stock, H200, poolable).pooled_last_block
    checkpointing = config(training_optimizations=TrainingOptimizations(gradient_checkpointing=True))
    assert not plan_for(checkpointing, model=poolable).pooled_last_block


def test_layers_are_our_own_on_the_cpu():
    encoder = dataclasses.replace(BERT, whole_layers=True)
    plan = plan_for(model=encoder)
    assert plan.whole_layers
    assert "one operation each" in reason(plan, "layers")
    assert not plan_for().whole_layers
    assert not plan_for(hardware=H200, model=encoder).whole_layers
    half = config(training_optimizations=TrainingOptimizations(precision="bf16"))
    checkpointing = config(training_optimizations=TrainingOptimizations(gradient_checkpointing=True))
    padded = config(packed_sequence=PackedSequenceConfig(enabled=False))
    assert plan_for(half, model=encoder).whole_layers
    for cfg in (checkpointing, padded):
        assert not plan_for(cfg, model=encoder).whole_layers
    asked = config(model=dataclasses.replace(config().model, use_liger_kernel=False))
    plan = plan_for(asked, model=encoder)
    assert not plan.whole_layers
    assert "use_liger_kernel" in reason(plan, "layers")


def test_products_in_bf16_are_our_own_on_the_cpu():
    half = TrainingOptimizations(precision="bf16")
    plan = plan_for(config(training_optimizations=half))
    assert plan.own_products
    assert "after every update" in reason(plan, "matrices")
    assert not plan_for(config(training_optimizations=half), hardware=H200).own_products
    assert not plan_for().own_products, "fp32 by torch's own library is what stock layers make"
    adapted = dataclasses.replace(BERT, trained=1000)
    experts = dataclasses.replace(BERT, experts=1000)
    for model in (adapted, experts):
        assert not plan_for(config(training_optimizations=half), model=model).own_products
    stock = dataclasses.replace(config().model, use_liger_kernel=False)
    assert not plan_for(config(training_optimizations=half, model=stock)).own_products
    compiled = dataclasses.replace(half, use_compile=True)
    assert not plan_for(config(training_optimizations=compiled)).own_products


def test_gpu_switches_have_an_effect_or_a_line():
    fusable = dataclasses.replace(BERT, can_fuse=True)
    assert plan_for(hardware=H200, model=fusable).fused_kernels
    plain = config(model=ModelConfig(pretrained_model_name_or_path="bert", use_liger_kernel=False))
    assert not plan_for(plain, H200, fusable).fused_kernels
    assert "no fused blocks for this bert yet" in reason(plan_for(hardware=H200), "kernels")
    eager = config(
        training_optimizations=TrainingOptimizations(capture=False),
        compile=CompileConfig(enabled=True, mode="max-autotune"),
    )
    plan = plan_for(eager, H200)
    assert (plan.capture, plan.compile) == (False, True)
    assert "max-autotune" in reason(plan, "compile")
    captured = plan_for(config(compile=CompileConfig(enabled=True)), H200)
    assert (captured.capture, captured.compile) == (True, True)


def test_no_validation_no_evaluation():
    plan = plan_for(data=dataclasses.replace(DATA, has_validation=False))
    assert plan.val_every_steps == 0
    assert plan.ckpt_every_steps == 125


def test_plan_is_json():
    import json

    value = json.loads(json.dumps(plan_for().to_json()))
    assert value["decisions"][0]["name"] == "task"


def test_a_process_plans_with_its_share_of_a_gpu(monkeypatch):
    """As with `PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.25`."""
    card = SimpleNamespace(major=9, minor=0, name="NVIDIA H200", total_memory=140 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.25)
    assert read_hardware().memory_gib == 35


def test_hardware_is_read():
    hardware = read_hardware()
    assert hardware.cores >= 1
    assert hardware.memory_gib > 0.5
