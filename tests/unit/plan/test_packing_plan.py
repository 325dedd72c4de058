"""The plan of a run that is packed by size: bins, steps, shapes, and what is refused."""

import dataclasses

import numpy as np
import pytest

from automodel.config.errors import ConfigError, UserError
from automodel.data.config import DataloaderConfig, DatasetConfig, PackedSequenceConfig
from automodel.data.mixture import Mixture
from automodel.models.config import ModelConfig
from automodel.plan.check import load_run_config
from automodel.plan.config import RunConfig, StepSchedulerConfig
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.tasks.registry import CAUSAL_LM

CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)
H200 = Hardware("cuda", "NVIDIA H200", 1, 140.0, True, True, 16)
LLAMA = ModelFacts("llama", "llama", 1_000_000_000, True, "reads each document as if it were alone")
T5 = ModelFacts("t5", "t5", 60_000_000, False, "relative position bias")
LENGTHS = np.clip(np.random.default_rng(0).lognormal(5, 0.8, 4000).astype(int), 4, 2048)
DATA = DataFacts(
    rows=4000, tokens=int(LENGTHS.sum()), longest=2048, max_length=2048, has_validation=False, lengths=LENGTHS
)


def plan_for(hardware=H200, model=LLAMA, data=DATA, size=4096, **sections):
    cfg = RunConfig(
        model=ModelConfig(pretrained_model_name_or_path="llama"),
        dataset=DatasetConfig(path="data.jsonl"),
        packed_sequence=PackedSequenceConfig(packed_sequence_size=size),
        **sections,
    )
    return make_plan(cfg, CAUSAL_LM, hardware, model, data)


def line(plan, name) -> str:
    return next(f"{d.value} ({d.reason})" for d in plan.decisions if d.name == name)


def test_bins_a_step_default_to_one():
    plan = plan_for()
    assert (plan.packed_sequence_size, plan.bucket_tokens, plan.grad_acc_steps) == (4096, 4096, 1)
    fewest = LENGTHS.sum() / 4096
    assert fewest < plan.steps_per_epoch < 1.02 * fewest
    assert plan.micro_batch_size >= plan.global_batch_size >= 15  # room for the fullest bin; the mean of a step
    assert line(plan, "batch").startswith("4,096 tokens × 1 a step (mean ")
    assert line(plan, "buckets").startswith("4096 (every bin is filled up to its size")


@pytest.mark.parametrize(
    ("sections", "bins"),
    [
        ({"dataloader": DataloaderConfig(batch_size=2)}, 2),
        ({"dataloader": DataloaderConfig(batch_size=2), "step_scheduler": StepSchedulerConfig(grad_acc_steps=3)}, 6),
        ({"step_scheduler": StepSchedulerConfig(global_batch_size=8)}, 8),
    ],
)
def test_batch_keys_count_bins(sections, bins):
    plan = plan_for(**sections)
    assert plan.grad_acc_steps == bins
    assert line(plan, "batch").startswith(f"4,096 tokens × {bins} a step")
    assert plan.steps_per_epoch == -(-plan_for().steps_per_epoch // bins)


def test_epochs_are_counted_and_not_multiplied():
    plan = plan_for(step_scheduler=StepSchedulerConfig(num_epochs=5))
    assert plan.num_epochs == pytest.approx(5.0)
    assert abs(plan.total_steps - 5 * plan.steps_per_epoch) <= 10
    capped = plan_for(step_scheduler=StepSchedulerConfig(num_epochs=5, max_steps=100))
    assert capped.total_steps == 100
    assert line(capped, "steps").startswith("100 (the smaller of max_steps 100 and 5 epochs of ")


def test_no_dummy_tokens_on_the_cpu():
    assert plan_for(CPU).bucket_tokens == 1


def test_mixtures_pack_too():
    mixture = Mixture(("a.jsonl", "b.jsonl"), (1000, 3000), (0.5, 0.25))
    plan = plan_for(data=dataclasses.replace(DATA, rows=1500, mixture=mixture))
    fewest = mixture.mean_tokens(LENGTHS) / 4096
    assert 0.95 * fewest < plan.steps_per_epoch < 1.08 * fewest
    assert line(plan, "mixture") == (
        "1,500 examples an epoch (a.jsonl: 1,000 of 1,000, b.jsonl: 500 of 3,000 (0.17 epochs))"
    )


def test_what_is_refused(tmp_path):
    with pytest.raises(UserError, match="packed_sequence_size is given, but t5 cannot be packed: relative position"):
        plan_for(model=T5)
    with pytest.raises(UserError, match=r"packed_sequence_size is 512, but \d+ of 4,000 samples are longer"):
        plan_for(size=512)
    path = tmp_path / "run.yaml"
    text = "model: m\ndataset: d\npacked_sequence: {packed_sequence_size: 512, bucket_tokens: 64, enabled: false}\n"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run_config([path])
    assert "packed_sequence_size: is given, but `enabled` is false" in str(caught.value)
    assert "bucket_tokens: is given beside `packed_sequence_size`" in str(caught.value)
