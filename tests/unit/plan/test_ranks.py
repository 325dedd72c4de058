"""How many ranks train: who says so, and what is chosen where nobody does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from automodel.config.errors import UserError
from automodel.distributed.layout import Layout
from automodel.distributed.world import World
from automodel.plan.check import load_run_config
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.plan.ranks import better_alone, choose_ranks
from automodel.tasks.registry import TEXT_CLASSIFICATION


@pytest.fixture
def config(tmp_path):
    def make(text=""):
        path = tmp_path / "run.yaml"
        path.write_text(f"model: bert\ndataset: x.csv\n{text}\n")
        return load_run_config([path])

    return make


def nobody_asks() -> int:
    raise AssertionError("the GPUs need not be counted")


def test_whoever_says_a_number_gets_it(config):
    plain, four = config(), config("distributed: {dp_size: 4}")
    assert choose_ranks(plain, 1, World(), nobody_asks).count == 1, "--nproc-per-node 1 forces one"
    assert choose_ranks(plain, 2, World(), nobody_asks).count == 2
    assert choose_ranks(four, None, World(), nobody_asks).count == 4
    assert choose_ranks(plain, None, World(1, 8, 1, 4), nobody_asks).count == 8
    assert choose_ranks(plain, 4, World(1, 8, 1, 4), nobody_asks).count == 8
    assert choose_ranks(plain, None, World(started_alone=True), nobody_asks).count == 1, "torchrun started one"
    with pytest.raises(UserError, match="--nproc-per-node is 2, but torchrun started 4 ranks"):
        choose_ranks(plain, 2, World(1, 8, 1, 4), nobody_asks)


@pytest.mark.parametrize("gpus", [0, 1])
def test_one_gpu_or_none_changes_nothing(config, gpus):
    chosen = choose_ranks(config(), None, World(), lambda: gpus)
    assert (chosen.count, chosen.why, chosen.automatic) == (1, "", False)
    assert choose_ranks(config("distributed: {tp_size: 2}"), None, World(), lambda: gpus).count == 2


@pytest.mark.parametrize(
    ("text", "count", "why"),
    [
        ("", 8, "all 8 visible GPUs (--nproc-per-node 1 for one)"),
        ("distributed: {strategy: fsdp2}", 8, "all 8 visible GPUs"),
        ("distributed: {tp_size: 2}", 8, "all 8 visible GPUs"),
        ("distributed: {tp_size: 3}", 6, "of 8 visible GPUs: the layout takes a multiple of 3"),
        ("step_scheduler: {global_batch_size: 64}", 8, "all 8 visible GPUs"),
        ("step_scheduler: {global_batch_size: 8}", 8, "all 8 visible GPUs"),
        (
            "step_scheduler: {global_batch_size: 48, local_batch_size: 8}",
            6,
            "48 cannot be shared by 8 ranks with micro",
        ),
        ("step_scheduler: {global_batch_size: 8, local_batch_size: 8}", 1, "dataloader.batch_size: 1, or 1 rank"),
        ("provider: huggingface", 8, "all 8 visible GPUs"),
        ("provider: huggingface\nbenchmark: {}", 1, "compare with stock Trainer, on one GPU"),
        ("distributed: {strategy: fsdp2}\nfp8: {}", 1, "fp8: FP8 products of a sharded model come in a later release"),
        ("distributed: {reduce_dtype: bf16}", 8, "all 8 visible GPUs"),
    ],
)
def test_all_visible_gpus_or_as_many_as_can_share_the_work(config, text, count, why):
    chosen = choose_ranks(config(text), None, World(), lambda: 8)
    assert chosen.count == count
    assert why in chosen.why
    assert chosen.automatic == (count > 1)


def test_a_run_goes_on_on_the_ranks_it_began_with(config):
    one = choose_ranks(config(), None, World(), lambda: 8, begun=1)
    assert (one.count, one.why) == (1, "the run began with 1")
    assert choose_ranks(config(), None, World(), lambda: 8, begun=4).count == 4
    assert choose_ranks(config(), 2, World(), nobody_asks, begun=4).count == 2
    assert choose_ranks(config(), None, World(), lambda: 2, begun=4).count == 2, "there are no four any more"


def test_more_examples_a_step_than_there_are_make_way_for_one(config):
    plan = SimpleNamespace(packed_sequence_size=0, global_batch_size=64, micro_batch_size=8, grad_acc_steps=1)
    assert better_alone(config(), plan, 64, 8) is None
    assert "8 × 1 × 8 examples on 8 GPUs would be more than the 63 there are" in better_alone(config(), plan, 63, 8)
    fixed = config("step_scheduler: {global_batch_size: 64}")
    assert better_alone(fixed, plan, 63, 8) is None, "one rank would have the same step"
    assert better_alone(fixed, plan, 7, 8) == "7 examples cannot be shared by 8 ranks"


def test_the_plan_says_how_many_and_why(config):
    eight = Hardware("cuda", "NVIDIA H200", 8, 140.0, True, True, 16)
    bert = ModelFacts("bert", "bert", 110_000_000, True, "attention goes through the attention interface")
    data = DataFacts(rows=1000, tokens=241_000, longest=512, max_length=512, has_validation=True)

    def reasons(**how):
        plan = make_plan(config(), TEXT_CLASSIFICATION, eight, bert, data, **how)
        return {decision.name: decision.reason for decision in plan.decisions}

    several = reasons(layout=Layout(replicas=8), why_ranks="all 8 visible GPUs")
    assert several["ranks"].startswith("all 8 visible GPUs; each holds the model")
    one = "NVIDIA H200, 140 GiB; 1 of 8 GPUs is used: "
    assert reasons(why_ranks="the run began with 1")["device"] == one + "the run began with 1"
    assert reasons()["device"] == one + "`automodel finetune llm --nproc-per-node 8` uses all"


def test_a_model_that_does_not_fit_is_told_of_shards(config):
    data = DataFacts(rows=1000, tokens=241_000, longest=512, max_length=512, has_validation=True)

    def memory(gpus, text=""):
        hardware = Hardware("cuda", "NVIDIA H200", gpus, 140.0, True, True, 16)
        large = ModelFacts("bert", "bert", 30_000_000_000, True, "attention goes through the attention interface")
        plan = make_plan(config(text), TEXT_CLASSIFICATION, hardware, large, data)
        return next(decision.reason for decision in plan.decisions if decision.name == "memory")

    shared = "distributed.strategy: fsdp2 shares weights and states among 8 GPUs"
    assert f"; this cannot fit; {shared}. To need less: " in memory(8)
    assert "; this cannot fit. To need less: " in memory(1)
    assert shared not in memory(8, "distributed: {strategy: fsdp2}")


def test_what_several_cannot_do_is_left_to_one(config):
    from automodel.engine.unasked_ranks import _prepared_or_why_not

    asked = []

    def refuses(count):
        asked.append(count)
        if count > 1:
            raise UserError("fp8: needs captured steps.\nUse one GPU.")

    assert _prepared_or_why_not(config(), refuses, 8) == (
        None,
        "8 cannot do it: fp8: needs captured steps. Use one GPU",
    )
    assert asked == [8, 1]

    def bad_for_both(count):
        raise UserError(f"no file, said {count}")

    with pytest.raises(UserError, match="no file, said 1"):
        _prepared_or_why_not(config(), bad_for_both, 8)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_reads_the_data_for_one(config, monkeypatch, rank):
    """Refused before anything was read (a layout), so nothing is in the cache yet."""
    from automodel.distributed.world import Alone
    from automodel.engine import unasked_ranks

    class OneOfTwo(Alone):
        world = World(rank, 2, rank, 2)

        def told(self, make):
            return make() if self.first else True

    prepared_for = []

    def prepare_run(cfg, trust, *, ranks, planned_ranks=None, **_):
        prepared_for.append(planned_ranks or ranks.size)
        if prepared_for[-1] > 1:
            raise UserError("cannot be shared by 2 ranks.")

    def step_aside(ranks, why):
        raise SystemExit(why)

    monkeypatch.setattr(unasked_ranks, "prepare_run", prepare_run)
    monkeypatch.setattr(unasked_ranks, "may_step_aside", lambda: True)
    monkeypatch.setattr(unasked_ranks, "step_aside", step_aside)
    with pytest.raises(SystemExit, match="2 cannot do it: cannot be shared by 2 ranks"):
        unasked_ranks.prepare_or_step_aside(config(), (), None, OneOfTwo(), "")
    assert prepared_for == ([2, 1] if rank == 0 else [2])
