"""A model's own loss is never replaced unseen: what its code learns besides ends the run by the model's name, and so
does a causal language model that sees its answer. Models that are right train, and the look at them leaves no trace."""

from __future__ import annotations

import io
import random
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
import yaml
from rich.console import Console

import automodel
import tiny_runs as tiny
from architectures.tiny import tiny_model
from automodel.config.errors import UserError
from automodel.engine import steps
from automodel.engine.own_loss import check_own_loss
from automodel.engine.prepare import prepare_run
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config

Z_LOSS = {"z_loss_coefficient": 0.01}


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """Writes a tiny model of a class, data for its task, and the config that trains it."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))

    def made(kind, task="causal-lm", config=None, **sections):
        tokenizer = tiny.make_tokenizer(decoder=True)
        ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        starts = {"decoder_start_token_id": tokenizer.eos_token_id} if task == "seq2seq" else {}
        tiny_model(kind, task, **ends, **starts, **(config or {})).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        rows = []
        for number, review in enumerate(tiny.reviews(12, longest=12)):
            ids = [*tokenizer(review["text"])["input_ids"], tokenizer.eos_token_id]
            target = {"label": number % 2} if task == "text-classification" else {"labels": ids}
            rows.append({"input_ids": ids, **target})
        tiny.write_jsonl(tmp_path / "train.jsonl", rows)
        run = {
            "task": task,
            "model": str(tmp_path / "model"),
            "dataset": {"path": str(tmp_path / "train.jsonl")},
            "dataloader": {"batch_size": 4},
            "optimizer": {"lr": 1e-3},
            "training_optimizations": {"precision": "fp32"},
            "step_scheduler": {"max_steps": 3, "log_every_steps": 1},
            "checkpoint": {"checkpoint_dir": str(tmp_path / "out"), "enabled": False},
            **sections,
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
        return load_run_config([tmp_path / "run.yaml"])

    return made


def losses_of(cfg):
    finetune(cfg, console=Console(file=io.StringIO()))
    return list(tiny.losses(Path(cfg.checkpoint.checkpoint_dir)).values())


REFUSED = {
    "bamba": ("causal-lm", Z_LOSS, "is a bamba model .* whose own loss is .* z_loss_coefficient: 0.01"),
    "prophetnet": ("seq2seq", {}, "is a prophetnet model .* whose own loss is .* disable_ngram_loss: False"),
    "xlnet": ("causal-lm", {}, "is a xlnet model .* whose attention sees later tokens"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_loss_and_an_answer_in_sight_end_the_run_before_it_begins(run_of, tmp_path, kind):
    task, config, said = REFUSED[kind]
    with pytest.raises(UserError, match=said):
        losses_of(run_of(kind, task, config))
    assert not list((tmp_path / "out").glob("run/*.json*")), "nothing of a run that did not begin"


def test_an_adapter_does_not_hide_another_loss(run_of):
    cfg = run_of("bamba", config=Z_LOSS, peft={"dim": 2, "target_modules": ["q_proj"]})
    with pytest.raises(UserError, match="bamba"):
        losses_of(cfg)


RIGHT = {
    "bamba": ("causal-lm", {}),
    "falcon": ("causal-lm", {}),
    "led": ("seq2seq", {}),
    "mamba": ("causal-lm", {}),
    "mixtral": ("causal-lm", {"output_router_logits": True}),
    "opt": ("causal-lm", {"dropout": 0.1}),
    "prophetnet": ("seq2seq", {"disable_ngram_loss": True}),
    "t5": ("seq2seq", {"dropout_rate": 0.1}),
    "xlnet": ("text-classification", {"num_labels": 2}),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_models_that_are_right_train_as_if_nobody_had_looked(run_of, tmp_path, monkeypatch, kind):
    cfg = run_of(kind, *RIGHT[kind])
    looked = []

    def look(*args):
        looked.append(check_own_loss(*args))
        return looked[-1]

    monkeypatch.setattr(steps, "check_own_loss", look)
    seen = losses_of(cfg)
    assert looked == [None], "compared, and nothing to say"
    monkeypatch.setattr(steps, "check_own_loss", lambda *args: None)
    (tmp_path / "out").rename(tmp_path / "before")
    assert seen == losses_of(cfg)


@pytest.mark.parametrize("kind", ["opt", "nemotron_h", "bamba"])
def test_the_look_leaves_no_trace(run_of, kind):
    prepared = prepare_run(run_of(kind))
    model = tiny_model(kind, "causal-lm", vocab_size=prepared.hf_config.vocab_size).train()
    model.get_submodule(next(name for name, _ in model.named_children())).eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = [buffer.clone() for buffer in model.buffers()]
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    wanted = random.random(), np.random.rand(), torch.rand(2)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    assert check_own_loss(prepared, model) is None
    got = random.random(), np.random.rand(), torch.rand(2)
    assert got[:2] == wanted[:2]
    assert got[2].equal(wanted[2])
    assert modes == [module.training for module in model.modules()]
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert all(buffer.equal(was) for buffer, was in zip(model.buffers(), buffers))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("config", "right"), [({}, True), (Z_LOSS, False)], ids=["plain", "z-loss"])
def test_weights_in_bf16(run_of, config, right):
    prepared = prepare_run(run_of("bamba", config=config))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        prepared.cfg.model.pretrained_model_name_or_path, dtype=torch.bfloat16
    )
    if right:
        assert check_own_loss(prepared, model) is None
    else:
        with pytest.raises(UserError, match="whose own loss"):
            check_own_loss(prepared, model)


def test_a_loss_that_cannot_be_asked_is_said_and_no_end(run_of, monkeypatch):
    prepared = prepare_run(run_of("opt"))
    model = tiny_model("opt", "causal-lm", vocab_size=prepared.hf_config.vocab_size)
    stock = type(model).forward

    def without_labels(self, labels=None, **given):
        return stock(self, **given) if labels is None else 1 / 0

    monkeypatch.setattr(type(model), "forward", without_labels)
    line = check_own_loss(prepared, model)
    assert (line.name, line.value) == ("own loss", "not compared")
    assert "ZeroDivisionError" in line.reason


def test_a_model_that_takes_no_text_alone_is_refused(run_of):
    with pytest.raises(UserError, match="is a blt model .* whose code does not take batches of text alone"):
        losses_of(run_of("blt"))


def batch_of(model):
    ids = torch.randint(5, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def test_a_length_that_only_training_refuses_is_found_before_it(run_of):
    with pytest.raises(UserError, match=r"reformer model .* batches of text alone: ValueError: If training"):
        finetune(run_of("reformer"), console=Console(file=io.StringIO()))


def test_the_drop_in_classes_keep_the_models_own_loss(run_of):
    cfg = run_of("bamba", config=Z_LOSS)
    folder = cfg.model.pretrained_model_name_or_path
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ours = automodel.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        wanted = stock(**batch_of(stock))
        assert ours(**batch_of(ours)).loss.equal(wanted.loss)
    plain = torch.nn.functional.cross_entropy(
        wanted.logits[:, :-1].flatten(0, 1), batch_of(stock)["labels"][:, 1:].flatten()
    )
    assert wanted.loss - plain > 1e-3, "the z-loss is there"


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_the_drop_in_trainers_keep_the_models_own_loss(run_of, tmp_path, kind):
    cfg = run_of("bamba", config=Z_LOSS)
    model = transformers.AutoModelForCausalLM.from_pretrained(cfg.model.pretrained_model_name_or_path)
    batch = batch_of(model)
    with torch.no_grad():
        wanted = float(model(**batch).loss)
    rows = [{"input_ids": row, "labels": row} for row in batch["input_ids"].tolist()]
    options = {
        "output_dir": str(tmp_path / "hf"), "max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    if kind == "Trainer":
        made = automodel.Trainer(
            model=model, args=automodel.TrainingArguments(**options), train_dataset=rows,
            data_collator=transformers.default_data_collator,
        )  # fmt: skip
    else:
        made = automodel.SFTTrainer(
            model=model, args=automodel.SFTConfig(**options, bf16=False),
            train_dataset=datasets.Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows]),
            processing_class=tiny.make_tokenizer(decoder=True),
        )  # fmt: skip
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(wanted, rel=1e-6)
