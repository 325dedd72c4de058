"""The plan's rough estimate of time: arithmetic at a measured speed, or the sentence that none is known."""

import dataclasses

import pytest

from automodel.data.config import DatasetConfig
from automodel.models.config import ModelConfig
from automodel.plan.config import RunConfig, StepSchedulerConfig
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.plan.time import about
from automodel.tasks.registry import TEXT_CLASSIFICATION

CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)
H200 = Hardware("cuda", "NVIDIA H200", 1, 140.0, True, True, 16)
BERT = ModelFacts("bert", "bert", 110_000_000, True, "attention goes through the attention interface")
DATA = DataFacts(rows=1000, tokens=241_000, longest=512, max_length=512, has_validation=True)


def line(data=DATA, hardware=CPU, model=BERT, **settings):
    sections = {"model": ModelConfig(pretrained_model_name_or_path="bert"), "dataset": DatasetConfig(path="data.csv")}
    plan = make_plan(RunConfig(**sections, **settings), TEXT_CLASSIFICATION, hardware, model, data)
    return next(d for d in plan.decisions if d.name == "time")


def test_it_grows_with_the_work_and_shrinks_with_the_cores():
    big = dataclasses.replace(DATA, tokens=24_100_000, has_validation=False)
    two = dataclasses.replace(CPU, cores=2)
    minutes = 3 * 24_100_000 * 6 * BERT.parameters / 140e9 / 60
    assert line(big, two).value == about(minutes * 60)
    assert line(big, dataclasses.replace(CPU, cores=4)).value == about(minutes * 30)
    once = StepSchedulerConfig(num_epochs=1)
    assert line(big, two, step_scheduler=once).value == about(minutes * 20)
    assert "72,300,000 tokens on 2 idle cores" in line(big, two).reason


def test_evaluations_count():
    held_out = dataclasses.replace(DATA, validation_tokens=24_100_000)
    assert "723,000 tokens and 3 evaluations" in line(held_out).reason
    alone = 24_100_000 * 6 * BERT.parameters / (70e9 * CPU.cores)  # three forward passes
    trained = 723_000 * 6 * BERT.parameters / (70e9 * CPU.cores)
    assert line(held_out).value == about(alone + trained)


def test_a_gpu_that_was_never_measured_is_not_guessed_at():
    assert line(hardware=H200).value == "under a minute"
    other = line(hardware=dataclasses.replace(H200, name="NVIDIA Other"))
    assert (other.value, other.reason) == (
        "not known yet",
        "no NVIDIA Other was measured; the first steps tell it",
    )


WORDS = {3: "under a minute", 61: "about 1 min", 7_000: "about 117 min", 10_800: "about 3 h", 300_000: "about 3 days"}


@pytest.mark.parametrize("seconds", WORDS)
def test_in_words(seconds):
    assert about(seconds) == WORDS[seconds]
