"""32,768 tokens of a model of 1.2 B on one GPU: what is kept, computed again or moved away follows from a byte
estimate, unasked where a batch cannot be made smaller."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from automodel.data.config import DataloaderConfig, DatasetConfig, PackedSequenceConfig
from automodel.models.config import ModelConfig
from automodel.optim.config import OptimizerConfig
from automodel.plan.config import CompileConfig, RunConfig, TrainingOptimizations
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.plan.memory import ModelShape
from automodel.tasks.registry import CAUSAL_LM

LONG = 32_768
GPU = Hardware("cuda", "a GPU", 1, 140.0, True, True, 16)
CPU = Hardware("cpu", "a CPU", 0, 16.0, False, False, 2)
SHAPE = ModelShape(16, 2048, 2048, 512, 32, 8192, 128_256, tied=True, rms=True, gated=True)
LLAMA = ModelFacts("llama", "llama", 1_235_814_400, True, "packs", can_fuse=True, shape=SHAPE, head_words=128_256)
DATA = DataFacts(
    rows=8, tokens=8 * LONG, longest=LONG, max_length=LONG, has_validation=False, lengths=np.full(8, LONG)
)  # fmt: skip
PURE = {"precision": "bf16-pure"}


def plan_for(gib=140.0, hardware=GPU, size=LONG, batch=None, optimizer="adamw", compiled="auto", **options):
    cfg = RunConfig(
        model=ModelConfig(pretrained_model_name_or_path="x"),
        dataset=DatasetConfig(path="x"),
        dataloader=DataloaderConfig(batch_size=batch),
        packed_sequence=PackedSequenceConfig(packed_sequence_size=size),
        optimizer=OptimizerConfig(name=optimizer),
        compile=CompileConfig(enabled=compiled),
        training_optimizations=TrainingOptimizations(**options),
    )
    return make_plan(cfg, CAUSAL_LM, dataclasses.replace(hardware, memory_gib=gib), LLAMA, DATA)


def line(plan, name):
    return next((d for d in plan.decisions if d.name == name), None)


@pytest.mark.parametrize(
    ("gib", "optimizer", "options", "checkpointing", "offload", "needed"),
    [
        (140.0, "adamw", {}, "none", False, (43, 47)),
        (80.0, "adamw", {}, "none", False, (43, 47)),
        (48.0, "adamw", {}, "selective", False, (35, 43.2)),
        (40.0, "adamw", {}, "full", False, (23, 36)),
        (24.0, "adamw", {}, "full", True, (20, 24)),
        (24.0, "adamw_8bit", PURE, "full", False, (12, 16)),
        (14.0, "adamw_8bit", PURE, "full", True, (8, 12.6)),
        (40.0, "adamw", {"gradient_checkpointing": "none"}, "none", False, (43, 47)),
        (24.0, "adamw", {"activation_offload": False}, "full", False, (23, 27)),
    ],
)
def test_bins_of_32k_tokens(gib, optimizer, options, checkpointing, offload, needed):
    plan = plan_for(gib, optimizer=optimizer, **options)
    assert (plan.path, plan.packed_sequence_size, plan.capture) == ("packed", LONG, True)
    assert (plan.checkpointing, plan.offload) == (checkpointing, offload)
    assert needed[0] < plan.memory_gib < needed[1]
    assert "activations of 32,768 tokens" in line(plan, "memory").reason
    assert line(plan, "loss").value == "fused linear + cross-entropy"  # 128,256 logits of each would be 8 GiB in bf16
    said = line(plan, "checkpointing")
    assert (said is None) == (checkpointing == "none")  # nothing asked, nothing done: nothing to say


def test_what_was_tried_is_said():
    plan = plan_for(24.0)
    assert line(plan, "checkpointing").reason.startswith(
        "auto: none 44.7 GiB, selective 36.0 GiB, full 25.5 GiB, full wi"
    )
    assert line(plan, "offload").reason.endswith("nothing else fits")


def test_batches_that_can_be_halved_are_not_computed_again():
    """Half the documents twice cost nothing; computing layers again does."""
    assert plan_for(40.0, size=0, batch=8).checkpointing == "none"
    assert plan_for(40.0, size=0, batch=1).checkpointing == "full"
    assert plan_for(16.0, CPU).checkpointing == "none"


def test_blocks_that_are_compiled_are_not_moved():
    plan = plan_for(24.0, compiled=True)
    assert plan.compile
    assert (plan.checkpointing, plan.offload) == ("full", False)


@pytest.mark.parametrize(("learned", "value", "saved"), [
    (0.1, "last layer", "exact, like the head; saves 5.5% of the layers' arithmetic and 90% of the head's arithmetic"),
    (1.0, None, None),
])  # fmt: skip
def test_what_is_saved_where_nothing_is_learned(learned, value, saved):
    llama = dataclasses.replace(LLAMA, read_saving=0.0615)
    data = dataclasses.replace(DATA, learned=learned)
    cfg = RunConfig(model=ModelConfig(pretrained_model_name_or_path="x"), dataset=DatasetConfig(path="x"))
    plan = make_plan(cfg, CAUSAL_LM, GPU, llama, data)
    found = line(plan, "last layer")
    assert (found and found.reason) == saved
    on_cpu = line(make_plan(cfg, CAUSAL_LM, CPU, llama, data), "head")
    assert (on_cpu and on_cpu.reason) == (value and "exact; saves 90% of the head's arithmetic")
