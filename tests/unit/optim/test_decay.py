"""Weight decay applies to the parameters that HF Trainer applies it to: name by name for every class that transformers
maps, in every optimizer, and in the losses of a run."""

from __future__ import annotations

import io
import os

import pytest
import torch
import transformers
import yaml
from rich.console import Console

import tiny_runs as tiny
from architectures.tiny import TASKS, mapped, tiny_config, tiny_model
from automodel.engine.run import finetune
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.models.families import FAMILIES
from automodel.optim.build import build_optimizer, decaying, parameter_groups
from automodel.optim.config import OptimizerConfig
from automodel.optim.kinds import KINDS, has_bitsandbytes
from automodel.plan.check import load_run_config
from hf_trainer import trainer_losses

DECAY = 0.25
VECTORS = ("bamba", "diffllama", "gpt_oss", "mamba2", "qwen3_next", "zamba2")
"""Families with vectors that are neither biases nor norms: decay rates of a state, sinks, λ."""
BY_CLASS = ("dbrx", "gpt2", "mpt", "roberta-prelayernorm")
"""Families with norms that only their class tells."""


def stock_decaying(model) -> set[str]:
    """By the method of the Trainer that is installed, which asks nothing of its object."""
    nobody: transformers.Trainer = None  # ty: ignore[invalid-assignment]
    wanted = set(transformers.Trainer.get_decay_parameter_names(nobody, model))
    return {name for name, _ in model.named_parameters() if name in wanted}


def without_memory(kind: str, task: str):
    with torch.device("meta"):
        return getattr(transformers, TASKS[task][0]).from_config(tiny_config(kind))


@pytest.mark.parametrize("kind", [*VECTORS, *BY_CLASS])
def test_names_are_those_of_hf_trainer(kind):
    task = "text-classification" if kind.startswith("roberta") else "causal-lm"
    model = without_memory(kind, task)
    ours = decaying(model)
    assert ours == stock_decaying(model)
    sizes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    assert any(sizes[name] < 2 for name in ours) == (kind in VECTORS)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_names_are_those_of_hf_trainer_for_every_class(task):
    compared, not_made = set(), []
    for kind in [kind for kind, other in mapped() if other == task]:
        try:
            model = without_memory(kind, task)
        except Exception as error:  # a class that cannot be made here; the sweep of tests/architectures is about those
            not_made.append(f"{kind}: {type(error).__name__}")
            continue
        ours, wanted = decaying(model), stock_decaying(model)
        assert ours == wanted, f"{kind}: {sorted(ours ^ wanted)[:5]}"
        compared.add(kind)
    assert len(not_made) <= 0.05 * len(compared), not_made
    if task == "causal-lm":
        decoders = {kind for kind, family in FAMILIES.items() if family.decoder}
        assert decoders <= compared


def groups_by_name(optimizer, model) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}


@pytest.mark.parametrize("name", KINDS)
def test_every_optimizer_decays_the_same(name):
    kind = KINDS[name]
    if not kind.plain and not has_bitsandbytes():
        pytest.skip("needs bitsandbytes")
    model = tiny_model("qwen3_next", "causal-lm")
    optimizer = build_optimizer(model, OptimizerConfig(name=name, weight_decay=DECAY))
    assert groups_by_name(optimizer, model) == stock_decaying(model)
    for group in optimizer.param_groups:
        assert group["weight_decay"] in (0.0, DECAY)


def test_captured_steps_decay_the_same():
    model = tiny_model("gpt_oss", "causal-lm")
    flat = FlatAdamW(parameter_groups(model, OptimizerConfig(weight_decay=DECAY)))
    assert groups_by_name(flat, model) == stock_decaying(model)


def test_all_parameters_decay_where_that_is_asked_for():
    model = tiny_model("gpt_oss", "causal-lm")
    (group,) = parameter_groups(model, OptimizerConfig(weight_decay=DECAY, decay_norms_and_biases=True))
    assert len(group["params"]) == len(list(model.parameters()))
    assert group["weight_decay"] == DECAY


def test_a_curve_of_qwen3_next_is_that_of_stock_trainer(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny_model("qwen3_next", "causal-lm", output_router_logits=False).save_pretrained(tmp_path / "start")
    tiny.make_tokenizer(decoder=True).save_pretrained(tmp_path / "start")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "start")
    rows = [{"input_ids": (ids := tokenizer(r["text"])["input_ids"]), "labels": ids} for r in tiny.reviews(96)]
    tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    run = {
        "task": "causal-lm",
        "model": os.fspath(tmp_path / "start"),
        "dataset": {"path": os.fspath(tmp_path / "train.jsonl")},
        "dataloader": {"shuffle": False, "batch_size": 4, "group_by_length": False},
        "optimizer": {"lr": 1e-3, "weight_decay": 10.0},
        "training_optimizations": {"precision": "fp32"},
        "step_scheduler": {"max_steps": 24, "log_every_steps": 1},
        "checkpoint": {"checkpoint_dir": os.fspath(tmp_path / "out"), "enabled": False},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    finetune(load_run_config([tmp_path / "run.yaml"]), console=Console(file=io.StringIO()))
    stock_rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    theirs = trainer_losses(
        tmp_path, tmp_path / "start", stock_rows, accumulation=1, batch=4, task="causal-lm", steps=24, weight_decay=10.0
    )
    assert list(tiny.losses(tmp_path / "out").values()) == pytest.approx(theirs, rel=1e-6)
