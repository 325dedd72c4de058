"""When only the rows of the word table that occur are trained, and the line that says so."""

import dataclasses

import pytest

from automodel.data.config import DatasetConfig
from automodel.models.config import ModelConfig
from automodel.optim.config import OptimizerConfig
from automodel.optim.kinds import Kind
from automodel.plan.config import RunConfig, TrainingOptimizations
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.plan.speed import decide_word_rows
from automodel.tasks.registry import TEXT_CLASSIFICATION, task_named

CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)
H200 = Hardware("cuda", "NVIDIA H200", 1, 140.0, True, True, 16)
BERT = ModelFacts("bert", "bert", 22_700_000, True, "packs", word_rows=30_522)
DATA = DataFacts(1000, 241_000, 512, 512, True, word_rows=8_112)


def planned(hardware=CPU, model=BERT, data=DATA, task="text-classification", **sections):
    cfg = RunConfig(
        model=ModelConfig(pretrained_model_name_or_path="bert"), dataset=DatasetConfig(path="data.csv"), **sections
    )
    return make_plan(cfg, task_named(task), hardware, model, data)


def test_the_line():
    plan = planned(optimizer=OptimizerConfig(weight_decay=0.01))
    line = next(d for d in plan.decisions if d.name == "word embeddings")
    assert plan.word_rows == 8_112
    assert line.value == "8,112 of 30,522 are trained"
    assert line.reason == (
        "exact: the others never occur in the training data, so they have no gradient and take their weight decay when "
        "they are read"
    )
    without = next(
        d for d in planned(optimizer=OptimizerConfig(weight_decay=0.0)).decisions if d.name == "word embeddings"
    )
    assert without.reason == "exact: the others never occur in the training data, so they stay as they are"


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_tasks(task):
    assert planned(task=task).word_rows == 8_112


@pytest.mark.parametrize(
    "change",
    [
        {"hardware": H200},
        {"task": "seq2seq"},
        {"model": dataclasses.replace(BERT, word_rows=0)},
        {"data": dataclasses.replace(DATA, word_rows=0)},
        {"data": dataclasses.replace(DATA, word_rows=28_000)},
        {"optimizer": OptimizerConfig(name="lion")},
        {"optimizer": OptimizerConfig(extra={"amsgrad": True})},
        {"optimizer": OptimizerConfig(target="torch.optim.Adam")},
        {"training_optimizations": TrainingOptimizations(gradient_checkpointing=True)},
    ],
)
def test_where_the_whole_table_is_trained(change):
    plan = planned(**change)
    assert plan.word_rows == 0
    assert not [d for d in plan.decisions if d.name == "word embeddings"]


@pytest.mark.parametrize(("bits", "rows"), [(32, 8_112), (8, 0)])
def test_moments_of_8_bits_are_not_cut(bits, rows):
    cfg = RunConfig(model=ModelConfig(pretrained_model_name_or_path="bert"), dataset=DatasetConfig(path="data.csv"))
    kind = Kind("adamw", bits=bits)
    assert decide_word_rows(cfg, TEXT_CLASSIFICATION, CPU, BERT, DATA, [], kind=kind, plain=True) == rows


def test_a_target_that_is_plain_adamw():
    assert planned(optimizer=OptimizerConfig(target="torch.optim.AdamW")).word_rows == 8_112
