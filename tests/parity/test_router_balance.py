"""The balance loss of every router that transformers maps, by the definition in `models/router_balance.py`.

A run of ours weighs the balance loss of each micro-batch by its tokens; Trainer, stock and ours, adds them up. Each is
compared with a reference of exactly that; with one micro-batch in a step all are the same.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DataCollatorForSeq2Seq
from transformers.models.auto.configuration_auto import model_type_to_module_name

import automodel
from hf_trainer import trainer_losses

sys.path.append(os.fspath(Path(__file__).parents[1] / "architectures"))
import examine
import tiny

STEPS, WEIGHT = 4, 0.3
ON = {"output_router_logits": True, "router_aux_loss_coef": WEIGHT}
EXCEPTIONS = {
    "dbrx": {"output_router_logits": True, "ffn_config": {"moe_loss_weight": WEIGHT}},
    "flint": {**ON, "mlp_only_layers": [0]},
    "jetmoe": {"output_router_logits": True, "aux_loss_coef": WEIGHT},
    "nllb-moe": {**ON, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "moe_token_dropout": 0.0},
    "qwen3_5_moe": {"text_config": {**ON, "vocab_size": 144}},  # its tokenizer adds words
    "qwen3_5_moe_text": {**ON, "vocab_size": 144},
    "qwen4_exp": {"text_config": ON},
}
QUICK = ("jamba", "mixtral", "nllb-moe", "olmoe", "qwen2_moe", "qwen3_moe")
WITHOUT = ("doge", "switch_transformers")
OLD = Version(transformers.__version__) < Version("5.18")
NOT_IN_5_17 = ("dbrx", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "jetmoe")
"""transformers 5.17 itself hands out no router logits of these, or fails for want of them."""


@functools.cache
def has_balance_loss(kind: str) -> bool:
    module = model_type_to_module_name(kind)
    folder = Path(importlib.util.find_spec("transformers").origin).parent / "models" / module
    files = [file.read_text() for file in folder.glob("modeling_*.py")]
    return any("def load_balancing_loss_func" in text for text in files)


ROUTERS = [
    (kind, task)
    for kind, task in tiny.mapped()
    if task in ("causal-lm", "seq2seq") and has_balance_loss(kind) and kind not in WITHOUT
    if not (OLD and kind in NOT_IN_5_17)
]
CURVES = [pytest.param(kind, task, marks=() if kind in QUICK else pytest.mark.slow) for kind, task in ROUTERS]


def router(kind, task):
    return tiny.tiny_model(kind, task, **EXCEPTIONS.get(kind, ON))


def balance_of(outputs):
    if "aux_loss" in outputs:
        return outputs.aux_loss
    return outputs.encoder_aux_loss + outputs.decoder_aux_loss


@pytest.mark.parametrize(("kind", "task"), ROUTERS)
def test_balance_is_that_of_transformers(kind, task):
    """Value and gradient, of a batch with padding."""
    from automodel.models.router import router_of

    model = router(kind, task)
    found = router_of(model)
    assert found.weight == WEIGHT
    ids = torch.randint(5, 90, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    outputs = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)
    ours = torch.stack([load.balance() for load in found.loads(outputs, mask)]).sum()
    theirs = balance_of(outputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [torch.autograd.grad(v, parameters, retain_graph=True, allow_unused=True) for v in (ours, theirs)]
    for mine, stock in zip(*gradients):
        assert (mine is None) == (stock is None)
        if mine is not None:
            torch.testing.assert_close(mine, stock, rtol=1e-5, atol=1e-8)


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Makes the folder of a model and its rows."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))

    def make(kind, task, model=None):
        model = router(kind, task) if model is None else model
        rows = examine.make_rows(task, model.config)[: STEPS * 4]
        examine._write(tmp_path, model, rows)
        return tmp_path, rows

    return make


def our_losses(folder, task, batch, accumulation):
    """Losses of our run and what its plan says of the router."""
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    (folder / "run.yaml").write_text(f"""
task: {task}
model: {folder}/start
dataset: {{path: {folder}/train.jsonl}}
dataloader: {{shuffle: false, batch_size: {batch}}}
optimizer: {{lr: 1e-3, weight_decay: 0.0}}
step_scheduler: {{max_steps: {STEPS}, log_every_steps: 1, grad_acc_steps: {accumulation}}}
training_optimizations: {{precision: fp32}}
checkpoint: {{enabled: false, checkpoint_dir: {folder}/out{batch}}}
""")
    finetune(load_run_config([folder / "run.yaml"]))
    out = folder / f"out{batch}" / "run"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    decisions = json.loads((out / "plan.json").read_text())["decisions"]
    said = next((line for line in decisions if line["name"] == "router"), None)
    return [line["loss"] for line in lines if line["split"] == "train"], said


def losses_of_trainer(folder, task, rows, batch, accumulation, kind=None):
    return trainer_losses(
        folder, folder / "start", rows, accumulation=accumulation, batch=batch, task=task, steps=STEPS,
        weight_decay=0.0, kind=kind,
    )  # fmt: skip


def reference(folder, task, rows, share):
    """Four steps of two micro-batches of two rows, in their order. `share(own, of_all)`: what the balance loss of a
    micro-batch counts, from its tokens and those of the step; cross-entropy is summed and divided by the labels of the
    step."""
    model = examine._stock_model(task, folder / "start").train()
    collate = DataCollatorForSeq2Seq(examine.make_tokenizer(model), model=model if task == "seq2seq" else None)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / STEPS)
        batches = [collate(rows[start : start + 2]) for start in (4 * step, 4 * step + 2)]
        labels = [b["labels"] if task == "seq2seq" else b["labels"][:, 1:] for b in batches]
        count, tokens = sum((x != -100).sum() for x in labels), [b["attention_mask"].sum() for b in batches]
        loss = 0.0
        for batch, targets, own in zip(batches, labels, tokens):
            outputs = model(**batch)
            logits = outputs.logits if task == "seq2seq" else outputs.logits[:, :-1]
            entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = loss + entropy / count + WEIGHT * share(own, sum(tokens)) * balance_of(outputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("kind", "task"), CURVES)
def test_one_micro_batch_is_that_of_trainer(prepared, kind, task):
    folder, rows = prepared(kind, task)
    ours, said = our_losses(folder, task, 4, 1)
    stock = losses_of_trainer(folder, task, rows, 4, 1)
    assert ours == pytest.approx(stock, rel=1e-4)
    assert losses_of_trainer(folder, task, rows, 4, 1, automodel.Trainer) == pytest.approx(stock, rel=1e-4)
    assert said["value"] == f"balance loss, weight {WEIGHT}"
    assert "Trainer" not in said["reason"]


@pytest.mark.parametrize(("kind", "task"), CURVES)
def test_micro_batches_weigh_as_defined(prepared, kind, task):
    """A run of ours weighs them by their tokens, and says that Trainer does not; our Trainer adds them up."""
    folder, rows = prepared(kind, task)
    ours, said = our_losses(folder, task, 2, 2)
    steps = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    by_length = [row for step in steps for row in sorted(step, key=lambda row: -len(row["input_ids"]))]
    assert ours == pytest.approx(reference(folder, task, by_length, lambda own, of_all: own / of_all), rel=1e-5)
    assert "of each of 2 micro-batches, weighted by its tokens" in said["reason"]
    assert "HF Trainer adds up those of the micro-batches, about 2 times as much" in said["reason"]
    if task == "seq2seq":  # stock Trainer adds up the means of their cross-entropies, too: another curve altogether
        return
    added = reference(folder, task, rows, lambda own, of_all: 1.0)
    assert losses_of_trainer(folder, task, rows, 2, 2, automodel.Trainer) == pytest.approx(added, rel=1e-5)
    assert losses_of_trainer(folder, task, rows, 2, 2) == pytest.approx(added, rel=1e-5)


def test_switch_transformers_has_no_balance_loss(prepared):
    """Its forward takes `output_router_logits` as an argument, which Trainer does not give, and not from the config."""
    model = tiny.tiny_model("switch_transformers", "seq2seq", **ON)
    folder, rows = prepared("switch_transformers", "seq2seq", model)
    stock = losses_of_trainer(folder, "seq2seq", rows, 4, 1)
    ours, said = our_losses(folder, "seq2seq", 4, 1)
    assert ours == pytest.approx(stock, rel=1e-4)
    assert losses_of_trainer(folder, "seq2seq", rows, 4, 1, automodel.Trainer) == pytest.approx(stock, rel=1e-4)
    assert said is None


def test_the_noise_of_a_router_is_all_that_differs(prepared, monkeypatch):
    """Switch multiplies what its routers read by noise while it trains. Two runs of stock Trainer that draw other
    numbers differ; ours equals the one that draws the same."""
    from transformers import Trainer

    from automodel.engine.step import TrainStep

    model = tiny.tiny_model("switch_transformers", "seq2seq", router_jitter_noise=0.1)
    folder, rows = prepared("switch_transformers", "seq2seq", model)

    def seeded(first):
        class Seeded(Trainer):
            def training_step(self, *args, **given):
                torch.manual_seed(first + self.state.global_step)
                return super().training_step(*args, **given)

        return losses_of_trainer(folder, "seq2seq", rows, 4, 1, Seeded)

    step, micro_step = iter(range(STEPS)), TrainStep._micro_step

    def seeded_step(*args):
        torch.manual_seed(next(step))
        return micro_step(*args)

    monkeypatch.setattr(TrainStep, "_micro_step", seeded_step)
    stock, other = seeded(0), seeded(100)
    assert other != pytest.approx(stock, rel=1e-4)
    assert our_losses(folder, "seq2seq", 4, 1)[0] == pytest.approx(stock, rel=1e-6)


def test_doge_is_refused(prepared):
    """Its routers take the logits of a token from other tokens, later ones too."""
    from automodel.config.errors import UserError

    model = tiny.tiny_model("doge", "causal-lm", is_moe=True, **ON)
    folder, _ = prepared("doge", "causal-lm", model)
    why = "does not take batches of text alone" if OLD else "sees later tokens"  # 5.17 fails in its own code
    with pytest.raises(UserError, match=f"doge model .*{why}"):
        our_losses(folder, "causal-lm", 4, 1)
