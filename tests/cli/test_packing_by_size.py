"""`packed_sequence_size` and `mixture` from a YAML file to a saved model: the plan, the steps, and resuming exactly."""

from __future__ import annotations

import io
import json
import random

import pytest

import tiny_runs as tiny
from automodel.config.errors import UserError

CHATTER = """
model: {model}
task: causal-lm
dataset: {{{data}}}
checkpoint: {{checkpoint_dir: {out}}}
optimizer: {{lr: 1e-2}}
lr_scheduler: constant
step_scheduler: {{{steps}, log_every_steps: 1}}
packed_sequence: {{packed_sequence_size: 64}}
dataloader: {{batch_size: 2}}
training_optimizations: {{precision: fp32}}
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.make_model_folder(tmp_path_factory.mktemp("models") / "llama", "llama", dropout=0.1)


@pytest.fixture
def finetune(tmp_path, monkeypatch, llama):
    from rich.console import Console

    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "tokens"))
    chance = random.Random(0)
    for name, count in (("a", 90), ("b", 150)):
        rows = [
            {"prompt": "what is good ?", "completion": " ".join(chance.choices(tiny.NEUTRAL, k=chance.randint(1, 24)))}
            for _ in range(count)
        ]
        tiny.write_jsonl(tmp_path / f"{name}.jsonl", rows)

    def start(out: str, steps: str, data: str = "", resume: bool = False, **settings):
        text = CHATTER.format(
            model=llama, data=data or f"path: {tmp_path / 'a.jsonl'}", out=tmp_path / out, steps=steps
        )
        (tmp_path / "run.yaml").write_text(text)
        cfg = load_run_config([tmp_path / "run.yaml"], [f"{k}={v}" for k, v in settings.items()])
        done = finetune(cfg, resume=resume, console=Console(file=io.StringIO(), width=200))
        plan = json.loads((done.folder / "run" / "plan.json").read_text())
        return done, plan, {d["name"]: f"{d['value']} ({d['reason']})" for d in plan["decisions"]}

    return start


def test_the_plan_counts_bins_and_the_run_takes_that_many_steps(finetune):
    done, plan, lines = finetune("out", "num_epochs: 3")
    assert plan["packed_sequence_size"] == 64
    assert lines["batch"].startswith("64 tokens × 2 a step (mean ")
    assert "full; packed_sequence_size is given, so batch_size and grad_acc_steps count bins" in lines["batch"]
    assert lines["steps"].startswith(f"{plan['total_steps']} (3 epochs of ")
    assert done.summary["steps"] == plan["total_steps"]
    assert done.summary["epochs"] == pytest.approx(3.0)
    assert plan["num_epochs"] == pytest.approx(3.0)
    losses = list(tiny.losses(done.folder).values())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("mixed", [False, True], ids=["one dataset", "a mixture"])
def test_a_run_that_stopped_in_the_middle_of_an_epoch_goes_on_exactly(finetune, tmp_path, mixed):
    data = ""
    if mixed:
        members = f"[{{path: {tmp_path / 'a.jsonl'}, weight: 0.7}}, {{path: {tmp_path / 'b.jsonl'}, weight: 0.3}}]"
        data = f"mixture: {members}"
    whole, plan, lines = finetune("whole", "max_steps: 30", data)
    assert 13 % plan["steps_per_epoch"]  # stops inside an epoch
    finetune("parts", "max_steps: 13", data)
    parts, _, _ = finetune("parts", "max_steps: 30", data, resume=True)
    assert tiny.losses(parts.folder) == tiny.losses(whole.folder)
    if mixed:
        from automodel.engine.saved import open_saved

        assert whole.summary["dataset"] == "a.jsonl, b.jsonl"
        # Prompts of a prediction are written as those of the first dataset were.
        assert open_saved(whole.folder).dataset.path == str(tmp_path / "a.jsonl")
        assert lines["mixture"] == (
            "129 examples an epoch (a.jsonl: 90 of 90, b.jsonl: 39 of 150 (0.26 epochs))"
        )  # fmt: skip


def test_another_size_cannot_continue(finetune):
    finetune("out", "max_steps: 3")
    with pytest.raises(UserError, match=r"packed_sequence\.packed_sequence_size: 64 → 128"):
        finetune("out", "max_steps: 6", resume=True, **{"packed_sequence.packed_sequence_size": 128})


def test_what_cannot_be_packed_by_size_is_refused(finetune, tmp_path):
    with pytest.raises(UserError, match=r"packed_sequence_size is 16, but \d+ of 90 samples are longer"):
        finetune("out", "max_steps: 3", **{"packed_sequence.packed_sequence_size": 16})
    bart = tiny.make_model_folder(tmp_path / "bart", "bart")
    with pytest.raises(UserError, match=r"packed_sequence\.packed_sequence_size is given, but bart cannot be packed"):
        finetune("out", "max_steps: 3", model=bart, task="seq2seq", **{
            "dataset.source_column": "prompt", "dataset.target_column": "completion",
        })  # fmt: skip


def test_evaluation_keeps_to_the_bins_too(finetune, tmp_path):
    done, _, _ = finetune("out", "max_steps: 4", validation_dataset=f"{{path: {tmp_path / 'b.jsonl'}}}")
    assert done.summary["validation"]["loss"] > 0


def test_classification_by_size(tmp_path, monkeypatch):
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "tokens"))
    path = tiny.write_run(tmp_path, rows=120, text="packed_sequence: {packed_sequence_size: 128}\n")
    done = finetune(load_run_config([path], ["step_scheduler.num_epochs=12"]))
    assert done.summary["validation"]["accuracy"] > 0.9


def test_models_that_cannot_pack_get_batches_of_similar_lengths(tmp_path, monkeypatch):
    from automodel.engine.prepare import prepare_run
    from automodel.engine.steps import make_step_loader
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "tokens"))
    path = tiny.write_run(tmp_path, rows=200, kind="bart", text="dataloader: {batch_size: 5}\n")

    def padding(*settings: str) -> float:
        prepared = prepare_run(load_run_config([path], settings))
        assert prepared.plan.path == "padded"
        loader = make_step_loader(prepared)
        steps = [loader.order.micro_batches(0, step) for step in range(len(loader))]
        batches = [loader.collate(b.tolist()) for step in steps for b in step]
        assert sum(b.num_documents for b in batches) == 200
        return 1 - sum(b.num_tokens for b in batches) / sum(b.input_ids_BS.numel() for b in batches)

    assert padding() < 0.25 * padding("dataloader.group_by_length=false")
