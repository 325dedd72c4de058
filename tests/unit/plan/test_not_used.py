"""Keys that are accepted and change nothing have a line in the plan; a default has none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from automodel.plan.check import load_run_config
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.tasks.registry import TEXT_CLASSIFICATION

CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)
H200 = Hardware("cuda", "NVIDIA H200", 1, 140.0, True, True, 16)
BERT = ModelFacts("bert", "bert", 110_000_000, True, "attention goes through the attention interface")
T5 = ModelFacts("t5", "t5", 60_000_000, False, "relative position bias")
DATA = DataFacts(
    rows=1000, tokens=241_000, longest=512, max_length=512, has_validation=True, lengths=np.full(1000, 241)
)
PLAIN = "model: bert\ntask: text-classification\ndataset: data.csv\n"


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """The plan's lines of a config that has these settings besides."""
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text("text,label\na,0\n")
    Path("folder").mkdir()

    def plan(*settings: str, hardware: Hardware = CPU, model: ModelFacts = BERT) -> dict[str, str]:
        Path("run.yaml").write_text(PLAIN)
        cfg = load_run_config(["run.yaml"], list(settings))
        data = dataclasses.replace(DATA, has_validation=cfg.validation_dataset is not None)
        decisions = make_plan(cfg, TEXT_CLASSIFICATION, hardware, model, data).decisions
        found = {str(d.value): d.reason for d in decisions if d.name == "not used"}
        return {**found, **{d.name: d.reason for d in decisions if d.name in ("batch", "optimizer", "evaluation")}}

    return plan


@pytest.mark.parametrize(
    ("settings", "key", "reason"),
    [
        (["dataset.name=mrpc"], "dataset.name", "data.csv is read from here, not from the hub"),
        (["dataset.revision=v2"], "dataset.revision", "data.csv is read from here, not from the hub"),
        (["dataset={path: csv, data_files: data.csv, revision: v2}"], "dataset.revision", "csv is read from here"),
        (["dataset.path=*.csv", "dataset.revision=v2"], "dataset.revision", "*.csv is read from here"),
        (
            ["validation_dataset={split: test, revision: v2}"],
            "validation_dataset.revision",
            "data.csv is read from here",
        ),
        (
            ["dataset={mixture: [{path: me/hub}, {path: data.csv, revision: v2}]}"],
            "dataset.mixture.1.revision",
            "data.csv is read from here",
        ),
        (["dataset={mixture: [data.csv, folder], name: x}"], "dataset.name", "data.csv, folder is read from here"),
        (["model=folder", "model.revision=v2"], "model.revision", "folder is a folder here, not a name on the hub"),
        (["model=folder", "model.cache_dir=x"], "model.cache_dir", "folder is a folder here, not a name on the hub"),
        (["training_optimizations.capture=true"], "training_optimizations.capture", "there is no GPU to record"),
        (["compile.mode=max-autotune"], "compile.mode", "no block is compiled"),
        (["compile={enabled: false, dynamic: false}"], "compile.dynamic", "no block is compiled"),
        (["compile.fullgraph=true"], "compile.fullgraph", "no block is compiled"),
        (
            ["validation_dataloader={batch_size: 4, shuffle: true}"],
            "validation_dataloader.batch_size, validation_dataloader.shuffle",
            "there is no validation_dataset; `automodel evaluate` reads the batch_size",
        ),
        (["validation_dataloader.num_workers=1"], "validation_dataloader.num_workers", "there is no validation_data"),
        (
            ["packed_sequence.packed_sequence_size=512", "step_scheduler={global_batch_size: 4, grad_acc_steps: 3}"],
            "step_scheduler.grad_acc_steps",
            "global_batch_size 4, which wins over grad_acc_steps 3",
        ),
    ],
)  # fmt: skip
def test_a_key_without_effect_has_a_line(lines, settings, key, reason):
    assert lines(*settings)[key].startswith(reason)


@pytest.mark.parametrize(
    "key", ["bnb_4bit_quant_type=fp4", "bnb_4bit_compute_dtype=bfloat16", "bnb_4bit_use_double_quant=true"]
)
def test_keys_of_four_bits_beside_eight(lines, key):
    found = lines("quantization.load_in_8bit=true", "peft={}", f"quantization.{key}")
    assert found[f"quantization.{key.partition('=')[0]}"] == "load_in_8bit: the base weights have 8 bits"
    assert len(lines("quantization.load_in_4bit=true", "peft={}", f"quantization.{key}")) == 2, "batch and optimizer"


def test_buckets_are_of_packed_batches(lines):
    setting = "packed_sequence.bucket_tokens=64"
    assert lines(setting, model=T5)["packed_sequence.bucket_tokens"] == "padded batches are not rounded up to buckets"
    assert "packed_sequence.bucket_tokens" not in lines(setting)


def test_evaluations_pin_memory_as_training_does(lines):
    found = lines("validation_dataset=data.csv", "validation_dataloader.pin_memory=false")
    assert found["evaluation"] == "validation_dataloader.pin_memory: changes no metric and is not needed"


def test_the_global_batch_wins_over_the_number_of_micro_batches(lines):
    sizes = ("dataloader.batch_size=4", "step_scheduler.global_batch_size=8")
    found = lines(*sizes, "step_scheduler.grad_acc_steps=4")
    assert found["batch"] == "global_batch_size 8, which wins over grad_acc_steps 4"
    assert lines(*sizes, "step_scheduler.grad_acc_steps=2")["batch"] == "global_batch_size 8", "the same number"


def test_norms_do_not_decay_where_nothing_does(lines):
    setting = "optimizer.decay_norms_and_biases=true"
    assert lines(setting)["optimizer"].startswith("no weight decay, so decay_norms_and_biases changes nothing;")
    assert lines(setting, "optimizer.weight_decay=0.1")["optimizer"].startswith("weight decay 0.1, everywhere;")


@pytest.mark.parametrize(
    ("settings", "hardware"),
    [
        ([], CPU),
        (["dataset={path: me/hub, name: x, revision: v2}", "model.revision=v2"], CPU),
        (["dataset={mixture: [me/hub, data.csv], revision: v2}"], CPU),
        (["dataset={path: data.csv, _target_: datasets.load_dataset}", "model.cache_dir=x"], CPU),
        (["model={name: folder, tokenizer: me/hub, cache_dir: x}"], CPU),
        (["training_optimizations.capture=true", "compile={enabled: true, mode: max-autotune}"], H200),
        (["validation_dataset=data.csv", "validation_dataloader.batch_size=4"], CPU),
    ],
)
def test_a_key_that_is_used_has_none(lines, settings, hardware):
    assert set(lines(*settings, hardware=hardware)) == {"batch", "optimizer"}
