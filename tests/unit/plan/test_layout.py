"""Layouts that cannot work are refused before anything is started, with the nearest that can."""

from __future__ import annotations

import pytest

from automodel.config.errors import NotYetError, UserError
from automodel.distributed.layout import Layout
from automodel.optim.kinds import KINDS
from automodel.plan.asked import asked_precision, decide_batch
from automodel.plan.check import load_run_config
from automodel.plan.facts import ModelFacts
from automodel.plan.layout import check_gpus, check_layout, refuse_cut_head, refuse_with_shards
from automodel.tasks.registry import CAUSAL_LM, TEXT_CLASSIFICATION


@pytest.fixture
def config(tmp_path):
    def make(text=""):
        path = tmp_path / "run.yaml"
        path.write_text(f"model: bert\ndataset: x.csv\n{text}\n")
        return load_run_config([path])

    return make


@pytest.mark.parametrize(
    ("text", "ranks", "micro", "accumulation"),
    [
        ("", 4, 8, 1),
        ("step_scheduler: {global_batch_size: 64}", 4, 8, 2),
        ("step_scheduler: {global_batch_size: 16}", 4, 4, 1),
        ("step_scheduler: {global_batch_size: 48}", 4, 6, 2),
        ("step_scheduler: {global_batch_size: 64, grad_acc_steps: 3}\ndataloader: {batch_size: 2}", 8, 2, 4),
        ("step_scheduler: {grad_acc_steps: 3}\ndataloader: {batch_size: 2}", 8, 2, 3),
    ],
)
def test_accumulation_follows_from_the_global_batch(config, text, ranks, micro, accumulation):
    lines = []
    assert decide_batch(config(text), lines, ranks) == (micro, accumulation)
    assert f"{micro} × {accumulation} × {ranks} ranks = {micro * accumulation * ranks}" in lines[0].value


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("step_scheduler: {global_batch_size: 16, local_batch_size: 8}", 4, "nearest that can: global_batch_size: 32,"),
        ("step_scheduler: {global_batch_size: 16, local_batch_size: 8}", 4, "batch_size: 4, or 2 ranks"),
        ("step_scheduler: {global_batch_size: 18}", 4, "global_batch_size: 16 or 20, or 3 ranks"),
        ("step_scheduler: {global_batch_size: 40}\ndataloader: {batch_size: 4}", 3, "global_batch_size: 36 or 48"),
        ("distributed: {dp_size: 2}", 4, "nearest possible: dp_size: 4 .or none., or --nproc-per-node 2"),
        ("distributed: {dp_size: 2}", 1, "dp_size is 2, but 1 rank is started"),
    ],
)
def test_impossible_layouts(config, text, ranks, message):
    with pytest.raises(UserError, match=message):
        check_layout(config(text), ranks)


def test_what_is_not_built(config):
    with pytest.raises(NotYetError, match="compiled blocks of a sharded model"):
        check_layout(config("distributed: {strategy: fsdp2}\ncompile: {enabled: true}"), 4)
    check_layout(config("distributed: {strategy: fsdp2}\ncompile: {enabled: true}"), 1)


def test_layouts_as_grids(config):
    assert check_layout(config(""), 4) == Layout(replicas=4)
    assert check_layout(config("distributed: {strategy: fsdp2}"), 1) == Layout()
    assert check_layout(config("distributed: {strategy: fsdp2}"), 4) == Layout(shards=4, fsdp=True)
    manager = "distributed: {_target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager, dp_size: none}"
    assert check_layout(config(manager), 2) == Layout(shards=2, fsdp=True)
    assert check_layout(config("distributed: {dp_replicate_size: 2}"), 4) == Layout(2, 2, fsdp=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training_optimizations: {precision: fp16}", "Use bf16"),
        ("optimizer: {name: adafactor}", "nearest possible: adamw"),
        ("optimizer: {name: lion_8bit}", "nearest possible: lion"),
    ],
)
def test_what_shards_cannot_be_trained_with(config, text, message):
    cfg = config(text)
    with pytest.raises(UserError, match=message):
        refuse_with_shards(Layout(shards=2, fsdp=True), KINDS[cfg.optimizer.name], asked_precision(cfg)[0], cfg)
    refuse_with_shards(Layout(replicas=2), KINDS[cfg.optimizer.name], asked_precision(cfg)[0], cfg)


def test_a_gpu_for_each():
    check_gpus(2, 0)
    check_gpus(2, 2)
    with pytest.raises(UserError, match="--nproc-per-node 2"):
        check_gpus(3, 2)


def test_a_head_that_is_no_plain_product_is_not_cut():
    """It ended in a traceback in the first step."""
    facts = ModelFacts("nemotron", "nemotron", 1_000_000, False, "not tested")
    with pytest.raises(UserError, match=r"tp_size is 2.*the head of nemotron is not known to be a plain product"):
        refuse_cut_head(Layout(tp=2, fsdp=True), CAUSAL_LM, facts)
    refuse_cut_head(Layout(tp=2, fsdp=True), TEXT_CLASSIFICATION, facts)
    refuse_cut_head(Layout(shards=2, fsdp=True), CAUSAL_LM, facts)
