"""Opponents by name, the ladder, and rows of the results files."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from automodel.benchmark.ladder import SWITCHES, exists, ladder_sides
from automodel.benchmark.rows import merge_into, merge_rows, rows_of
from automodel.benchmark.sides import AUTOMODEL, STOCK, TRAINERS, TUNED, Side, Tried, sides_against
from automodel.config.errors import UserError


def test_the_stock_side_is_the_reference_script():
    assert STOCK.padding == "max_length"
    assert not STOCK.same_precision
    assert not STOCK.compile
    assert TUNED.padding == "longest"
    assert TUNED.same_precision
    assert not TUNED.cudnn_attention


def test_only_the_stock_side_is_left_as_it_comes():
    """Every other side gets the precision and the attention that are fastest where it runs."""
    assert [name for name, side in TRAINERS.items() if not side.trainer.trial] == ["hf-trainer"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["hf-trainr"], "there is no opponent `hf-trainr`. Choose from hf-trainer, hf-trainer-tuned"),
        ([], "names no opponent"),
        (["hf-trainer", "hf-trainer"], "twice"),
    ],
)
def test_wrong_opponents(names, message):
    with pytest.raises(UserError, match=message):
        sides_against(names)


def test_sides_travel_as_json():
    tuned = TRAINERS["hf-trainer-tuned"]
    tried = dataclasses.replace(TUNED, tried=(Tried("bf16", "eager", 279.0), Tried("bf16", "sdpa", 377.0)))
    assert tried.chosen == Tried("bf16", "eager", 279.0)
    found = dataclasses.replace(tuned, trainer=tried)
    for side in (*TRAINERS.values(), found, AUTOMODEL, Side("x", "y", overrides=("a.b=1",))):
        assert Side.from_json(json.loads(json.dumps(side.to_json()))) == side


def fake_job(device: str, path: str = "packed", shuffle: bool = True, asked: str | None = None):
    plan = SimpleNamespace(precision="bf16" if device == "cuda" else "fp32", path=path)
    packing = SimpleNamespace(reason="its attention has a bias")
    return SimpleNamespace(
        device=device,
        settings={"shuffle": shuffle, "asked_precision": asked},
        prepared=SimpleNamespace(plan=plan, packing=packing),
    )


def test_ladder_on_the_cpu():
    rungs, missing = ladder_sides(fake_job("cpu"))
    assert [rung.name for rung in rungs] == [
        "hf-trainer", "hf-trainer-1", "hf-trainer-2", "hf-trainer-tuned", "automodel-0", "automodel"
    ]  # fmt: skip
    assert rungs[3].label == "+ the fastest precision and attention, by trying"
    assert [rung.trainer.trial for rung in rungs if not rung.ours] == [False, False, False, True]
    assert not rungs[2].trainer.same_precision, "the precision comes with the rung above"
    assert rungs[-2].overrides == ("packed_sequence.enabled=false",)
    assert not rungs[-1].overrides
    assert not missing


def test_ladder_without_shuffling_has_no_length_rung():
    names = [rung.name for rung in ladder_sides(fake_job("cpu", shuffle=False))[0]]
    assert names == ["hf-trainer", "hf-trainer-1", "hf-trainer-tuned", "automodel-0", "automodel"]


def test_ladder_where_the_config_asks_for_a_precision():
    job = fake_job("cpu", asked="training_optimizations.precision")
    job.prepared.plan.precision = "bf16"
    labels = [rung.label for rung in ladder_sides(job)[0] if not rung.ours]
    assert labels[1:] == [
        "+ dynamic padding", "+ bf16", "+ batches of similar lengths", "+ the fastest attention, by trying",
    ]  # fmt: skip


def test_ladder_of_a_model_that_cannot_be_packed():
    rungs, missing = ladder_sides(fake_job("cpu", path="padded"))
    assert [rung.name for rung in rungs][-1] == "automodel"
    assert "no rung for packing: its attention has a bias" in missing


def test_ladder_on_a_gpu_turns_one_thing_on_at_a_time():
    rungs, missing = ladder_sides(fake_job("cuda"))
    trainers = [rung for rung in rungs if not rung.ours]
    assert [rung.label for rung in trainers[1:]] == [
        "+ dynamic padding",
        "+ bf16",
        "+ cuDNN attention off",
        "+ batches of similar lengths, workers",
        "+ the fastest attention, by trying",
    ]
    own = [len(rung.overrides) for rung in rungs if rung.ours]
    assert own == list(range(len(own) - 1, -1, -1))
    assert len(own) - 1 + len(missing) == len(SWITCHES)


def test_switches_name_real_keys_or_are_said_to_be_missing():
    assert exists("packed_sequence.enabled=false")
    assert not exists("packed_sequence.enabld=false")
    assert not exists("nothing.at_all=1")


def test_rows_have_the_committed_form(document):
    sides, system = document["sides"] | {"lost": {"status": "failed"}}, document["system_info"]
    rows = rows_of("distilbert-b8", sides, system, date="2026-01-01", commit="abc", command="python x")
    assert [row["provider"] for row in rows] == ["hf-trainer", "automodel"]
    wanted = (
        "workload provider ms_per_step ms_p20 ms_p80 tokens_per_s peak_gib first_step_s wall_s flush_s speedup_vs_hf "
        "speedup_vs_hf_stock speedup_vs_hf_compile speedup_vs_hf_ungrouped precision attention date commit torch "
        "transformers gpu processor cores threads command"
    )
    assert set(rows[1]) >= set(wanted.split())
    assert rows[1]["speedup_vs_hf_stock"] == 4.0
    assert rows[1]["speedup_vs_hf"] is None  # the tuned side was not run
    tuned = {**sides["hf-trainer"], "provider": "hf-trainer-tuned", "ms_per_step": 20.0, "ms_mean": 25.0}
    rows = rows_of(
        "x", sides | {"hf-trainer-tuned": tuned}, system, date="2026-01-01", commit="abc", command="python x"
    )
    ours = next(row for row in rows if row["provider"] == "automodel")
    assert (ours["speedup_vs_hf"], ours["speedup_vs_hf_mean_step"]) == (2.0, 2.5)


def test_merging_replaces_the_same_workload_and_provider(tmp_path):
    kernel = {"op": "gelu", "provider": "torch"}
    old = [{"workload": "a", "provider": "x", "ms": 1}, kernel, {"workload": "a", "provider": "y", "ms": 2}]
    new = [{"workload": "a", "provider": "x", "ms": 9}, {"workload": "b", "provider": "x", "ms": 3}]
    merged = merge_rows(old, new)
    assert merged == [new[0], kernel, old[2], new[1]]
    path = tmp_path / "results" / "cpu.json"
    merge_into(path, old)
    merge_into(path, new)
    assert json.loads(path.read_text()) == merged
