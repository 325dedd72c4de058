"""Real runs with each optimizer that runs on the CPU: stopped and continued, losses and weights are those of a run left
alone. Packed batches, clipping, two micro-batches a step, dropout, a schedule; one of them in pure bf16."""

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import tiny_runs as tiny
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config

SETTINGS = (
    "step_scheduler: {max_steps: 6, log_every_steps: 1, val_every_steps: 100, grad_acc_steps: 2}\n"
    "dataloader: {batch_size: 2}\n"
    "lr_scheduler: {name: inverse_sqrt, warmup_steps: 2}\n"  # does not depend on the length of the run
)
OPTIMIZERS = [
    ["optim=paged_adamw_32bit"],
    ["optim=lion_32bit", "optimizer.lr=1e-4", "optimizer.weight_decay=0.1"],
    ["optim=adafactor"],
    ["optim=muon", "optimizer.muon_lr=2e-3"],
    ["optim=sgd", "optimizer.momentum=0.9"],
    ["optim=rmsprop"],
    ["optim=adagrad", "optimizer.lr=1e-2"],
    ["optimizer._target_=torch.optim.Adafactor", "optimizer.lr=1e-2"],
    ["optim=muon", "training_optimizations.precision=bf16-pure"],
    ["optim=lion", "training_optimizations.precision=bf16", "gradient_checkpointing=selective"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    tiny.write_run(path, text=SETTINGS, dropout=0.1)
    return path


@pytest.mark.parametrize("overrides", OPTIMIZERS, ids=lambda o: ", ".join(o[:1] + o[2:]))
def test_continues_exactly(folder, tmp_path, monkeypatch, overrides):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))

    def run(out, steps, resume=False):
        cfg = load_run_config(
            [folder / "run.yaml"],
            [*overrides, f"step_scheduler.max_steps={steps}", f"checkpoint.checkpoint_dir={tmp_path / out}"],
        )
        with (tmp_path / "console.txt").open("a") as file:
            finetune(cfg, resume=resume, console=Console(file=file, width=300))
        return tiny.losses(tmp_path / out)

    whole = run("whole", 12)
    first = run("parts", 6)
    assert {step: whole[step] for step in first} == first
    assert run("parts", 12, resume=True) == whole
    for group in ("model", "optimizer"):
        last = f"run/steps/step-00000012/{group}.safetensors"
        ours, theirs = (load_file(tmp_path / name / last) for name in ("parts", "whole"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert min(whole[step] for step in (10, 11, 12)) < whole[1]
