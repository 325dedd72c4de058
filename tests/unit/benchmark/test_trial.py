"""The trial that gives the tuned Trainer its precision and attention."""

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest
import torch

import tiny_models
import tiny_runs as tiny
from automodel.benchmark import launch, trial
from automodel.benchmark.job import asked_key, make_job
from automodel.benchmark.recorder import Recorder
from automodel.benchmark.sides import TRAINERS, TUNED, Side, Tried
from automodel.benchmark.trainer_side import described, precision_of, train_with_trainer
from automodel.plan.check import load_run_config

OPEN = {"device": "cpu", "precision": "fp32", "asked_precision": None}


def test_on_a_processor_bf16_is_tried_beside_fp32_unless_the_config_asks_for_one():
    assert trial.precisions_to_try(OPEN) == ["fp32", "bf16"]
    assert trial.precisions_to_try({**OPEN, "asked_precision": "training_optimizations.bf16"}) == ["fp32"]
    assert trial.precisions_to_try({**OPEN, "device": "cuda", "precision": "bf16"}) == ["bf16"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", None),
        ("training_optimizations: {precision: fp32}", "training_optimizations.precision"),
        ("training_optimizations: {bf16: true}", "training_optimizations.bf16"),
        ("training_optimizations: {bf16: false}", "training_optimizations.bf16"),
        ("model: {pretrained_model_name_or_path: x, torch_dtype: bfloat16}", "model.torch_dtype"),
    ],
)
def test_which_key_asks_for_a_precision(tmp_path, text, key):
    path = tmp_path / "run.yaml"
    path.write_text(f"{'' if text.startswith('model') else 'model: x'}\ntask: causal-lm\ndataset: y\n{text}\n")
    assert asked_key(load_run_config([path])) == key


def test_attentions_are_those_that_load():
    model = tiny_models.tiny("bert", "text-classification")[1]
    assert trial.attentions_to_try(model, "fp32") == ["sdpa", "eager"]
    assert model.config._attn_implementation == "sdpa"
    fixed = SimpleNamespace(config=SimpleNamespace(_attn_implementation="eager"), set_attn_implementation=print)
    assert trial.attentions_to_try(fixed, "fp32") == ["eager"]


def test_the_race_is_won_by_the_fastest_and_survives_one_that_fails(monkeypatch):
    turns, now = [], [0.0]
    monkeypatch.setattr(trial.time, "perf_counter", lambda: now[0])

    def takes(name: str, seconds: float):
        def run() -> None:
            turns.append(name)
            now[0] += seconds

        return run

    def fails() -> None:
        raise torch.OutOfMemoryError("too much")

    contestants = {"middle": takes("middle", 1.1), "fails": fails, "fast": takes("fast", 1.0), "slow": takes("slow", 5)}
    found = trial.race(contestants)
    assert list(found) == ["fast", "middle", "slow"]
    assert found == pytest.approx({"fast": 1.0, "middle": 1.1, "slow": 5.0})
    assert turns[:6] == ["middle", "fast", "slow"] * 2, "in turns, the first of them untimed"
    assert turns.count("slow") == 1 + trial.CERTAIN_ROUNDS, "what is far behind is not tried again"
    assert turns.count("fast") == turns.count("middle") == 1 + trial.ROUNDS


def test_another_program_during_one_round_does_not_decide_the_race(monkeypatch):
    """Three times the time in the first timed round: a pause of the machine, as it was seen in one step of twelve."""
    now, seconds = [0.0], {"fast": [9.0, 3.0, 1.0, 1.0], "slow": [9.0, 1.4, 1.4, 1.4]}
    monkeypatch.setattr(trial.time, "perf_counter", lambda: now[0])

    def takes(name: str):
        def run() -> None:
            now[0] += seconds[name].pop(0)

        return run

    assert list(trial.race({name: takes(name) for name in ("slow", "fast")})) == ["fast", "slow"]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trial")
    left_open = "training_optimizations: {precision: auto}\n"
    path = tiny.write_run(folder, text=f"dataloader: {{batch_size: 4}}\nstep_scheduler: {{max_steps: 12}}\n{left_open}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMODEL_CACHE", str(folder / "tokens"))
        return make_job(load_run_config([path]), folder / "work", steps=None, warmup=None)


def test_the_trial_times_every_choice_on_the_runs_own_model_and_batches(job, tmp_path):
    found = trial.try_out(job.settings, TUNED, tmp_path)
    assert {(one.precision, one.attention) for one in found} == {
        ("fp32", "sdpa"), ("fp32", "eager"), ("bf16", "sdpa"), ("bf16", "eager"),
    }  # fmt: skip
    assert all(one.ms > 0 for one in found)
    assert found == sorted(found, key=lambda one: one.ms)


def test_what_is_tried_computes_in_what_it_is_called(job, tmp_path, monkeypatch):
    """The products of each contestant, by type, and gradients for every weight."""
    seen = {}
    monkeypatch.setattr(trial, "race", lambda contestants: seen.update(contestants) or {})
    trial.try_out(job.settings, TUNED, tmp_path)
    linear, used = torch.nn.functional.linear, set()

    def watched(x, weight, bias=None):
        out = linear(x, weight, bias)
        used.add(out.dtype)
        return out

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    for (precision, _), run in seen.items():
        used.clear()
        run()
        assert used == {torch.bfloat16 if precision == "bf16" else torch.float32}


def test_the_tuned_side_gets_what_won_and_its_setup_says_so(job, tmp_path, monkeypatch):
    """One trial serves a side's repeats and the compiled side; the stock side is not tried."""
    started = []

    def run(command, **_):
        started.append(command[2])
        found = [
            {"precision": "bf16", "attention": "eager", "ms": 2.0},
            {"precision": "fp32", "attention": "sdpa", "ms": 5.0},
        ]
        tmp_path.joinpath("work", command[4].rpartition("/")[2]).write_text(json.dumps(found))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(launch.subprocess, "run", run)
    (tmp_path / "work").mkdir()
    fake = SimpleNamespace(folder=tmp_path / "work", trust=())
    names = ("hf-trainer", "hf-trainer-tuned", "hf-trainer-compile")
    said = []
    stock, tuned, compiled = launch.with_trials(
        fake, [TRAINERS[name] for name in names], tmp_path / "logs", said.append
    )
    assert started == ["automodel.benchmark.trial"]
    assert stock == TRAINERS["hf-trainer"]
    assert tuned.trainer.chosen == compiled.trainer.chosen == Tried("bf16", "eager", 2.0)
    assert "bf16 eager 2.0 ms, fp32 sdpa 5.0 ms" in said[-1]
    assert precision_of(job.settings, tuned.trainer) == "bf16"
    words = described({**job.settings, "precision": "fp32"}, tuned.trainer, "eager")
    assert words.startswith("bf16 (the run: fp32), dynamic padding")
    assert "eager attention" in words
    assert words.endswith("the fastest of 2 that were tried")


def test_a_trial_that_fails_leaves_the_side_as_it_was_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=-9))
    fake, said = SimpleNamespace(folder=tmp_path, trust=()), []
    (side,) = launch.with_trials(fake, [Side("x", "X", TUNED)], tmp_path / "logs", said.append)
    assert side == Side("x", "X", TUNED)
    assert "the trial failed, so nothing is chosen for X" in said[-1]


def test_trainer_itself_takes_what_won(job, tmp_path):
    """Trainer's own autocast on the processor, and the attention that was chosen, in a run that is in fp32."""
    settings = {**job.settings, "precision": "fp32", "total_steps": 3, "val_every_steps": 0}
    chosen = dataclasses.replace(TUNED, tried=(Tried("bf16", "eager", 1.0),))
    recorder = Recorder("cpu", 0, time.monotonic())
    measured = train_with_trainer(settings, chosen, tmp_path, recorder)
    assert (measured["precision"], measured["attention"], measured["threads"]) == (
        "bf16",
        "eager",
        torch.get_num_threads(),
    )
    plain = Recorder("cpu", 0, time.monotonic())
    train_with_trainer(settings, dataclasses.replace(TUNED, same_precision=False), tmp_path, plain)
    assert recorder.losses() != plain.losses(), "bf16 rounds"
    assert recorder.losses() == pytest.approx(plain.losses(), rel=2e-2)
