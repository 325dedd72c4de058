"""The balance loss of routers over ranks: one rank equals two and four where the micro-batch of all together is the
same, also in an epoch's last step, which has a document for one rank alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import tiny_runs
from automodel.distributed.world import ALONE
from automodel.engine.run import finetune
from automodel.engine.step_balance import StepBalance
from automodel.models.head_outputs import Balanced
from automodel.models.router_balance import ExpertLoad, expert_load
from automodel.plan.check import load_run_config
from forked_ranks import spawn
from many_runs import TOLERANCE, saved

sys.path.append(os.fspath(Path(__file__).parents[1] / "architectures"))
import examine
import tiny

ON = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
MODELS = ("jamba", "mixtral", "qwen3_moe")
STEPS = 4
ROWS = 8 * (STEPS - 1) + 1

RUN = f"""
task: causal-lm
model: {{folder}}/start
dataset: {{{{path: {{folder}}/train.jsonl}}}}
validation_dataset: {{{{path: {{folder}}/train.jsonl}}}}
dataloader: {{{{shuffle: false, batch_size: {{batch}}}}}}
optimizer: {{{{lr: 1e-3}}}}
step_scheduler: {{{{max_steps: {STEPS}, global_batch_size: 8, log_every_steps: 1, ckpt_every_steps: {STEPS}}}}}
training_optimizations: {{{{precision: fp32}}}}
distributed: {{{{{{layout}}}}}}
checkpoint: {{{{checkpoint_dir: {{folder}}/{{out}}}}}}
"""


def train(ranks, folder: Path, layout: str, micro_batches: int = 1) -> None:
    out = f"on{ranks.size}-{layout}"
    config = folder / f"{out}.yaml"
    if ranks.first:
        batch = 8 // ranks.size // micro_batches
        text = RUN.format(folder=folder, out=out, batch=batch, layout=f"strategy: {layout}")
        config.write_text(text)
    ranks.barrier()
    finetune(load_run_config([config]), ranks=ranks)


def assert_same(one: Path, many: Path) -> None:
    for split in ("train", "validation"):
        wanted, got = tiny_runs.losses(one, split), tiny_runs.losses(many, split)
        assert list(wanted) == list(got)
        assert list(got.values()) == pytest.approx(list(wanted.values()), rel=TOLERANCE)
    wanted, got = saved(one, STEPS), saved(many, STEPS)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_ranks_train_what_one_process_trains(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    model = tiny.tiny_model(kind, "causal-lm", **ON)
    examine._write(tmp_path, model, examine.make_rows("causal-lm", model.config)[:ROWS])
    train(ALONE, tmp_path, "ddp")
    for ranks, layout in ((2, "ddp"), (4, "ddp"), (2, "fsdp2")):
        spawn(ranks, train, tmp_path, layout)
        assert_same(tmp_path / "on1-ddp", tmp_path / f"on{ranks}-{layout}")
        plan = json.loads((tmp_path / f"on{ranks}-{layout}/run/plan.json").read_text())
        said = next(line["reason"] for line in plan["decisions"] if line["name"] == "router")
        assert f"of the tokens of all {ranks} ranks together" in said
        assert f"HF Trainer adds up those of micro-batches and ranks, about {ranks} times as much" in said


@pytest.mark.slow
def test_whole_and_sharded_models_put_micro_batches_together_alike(tmp_path, monkeypatch):
    """Two micro-batches in a step; in the last one a rank has one and the other two."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    model = tiny.tiny_model("mixtral", "causal-lm", **ON)
    examine._write(tmp_path, model, examine.make_rows("causal-lm", model.config)[: ROWS + 4])
    for layout in ("ddp", "fsdp2"):
        spawn(2, train, tmp_path, layout, 2)
    assert_same(tmp_path / "on2-ddp", tmp_path / "on2-fsdp2")


EXPERTS, TOP_K, LABELS = 4, 2, 37.0
HANDS = {2: ((9, 5), (7,)), 4: ((6, 3), (5,), (4, 2), ())}
"""Tokens of each rank's micro-batches in a step."""


def logits_of(rank: int, number: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(tokens, EXPERTS, generator=generator, requires_grad=True)


def balance_of_a_rank(ranks, folder: Path) -> None:
    hand = HANDS[ranks.size][ranks.rank]
    tokens = sum(map(sum, HANDS[ranks.size]))
    step = StepBalance((EXPERTS,), ranks, len(hand), labels=LABELS, tokens=tokens, device="cpu")
    total, gradients = torch.zeros(()), []
    for number, size in enumerate(hand):
        logits = logits_of(ranks.rank, number, size)
        outputs = Balanced(logits, (expert_load([logits], TOP_K, None),), weight=0.5)
        outputs = step.weighed(outputs, size)
        (outputs.balance * outputs.labels).backward()
        total += (outputs.balance * outputs.labels).detach()
        gradients.append(logits.grad)
    step.finish()
    torch.save((total, gradients), folder / f"{ranks.rank}.pt")


@pytest.mark.parametrize("ranks", HANDS)
def test_ranks_with_fewer_micro_batches_take_part(tmp_path, ranks):
    """The definition, with what has the same number in the step put together."""
    spawn(ranks, balance_of_a_rank, tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    tokens, wanted, leaves = sum(map(sum, HANDS[ranks])), torch.zeros(()), {}
    for number in range(max(map(len, HANDS[ranks]))):
        parts = [(rank, hand[number]) for rank, hand in enumerate(HANDS[ranks]) if number < len(hand)]
        for rank, size in parts:
            leaves[rank, number] = logits_of(rank, number, size)
        together = torch.cat([leaves[rank, number] for rank, _ in parts])
        load: ExpertLoad = expert_load([together], TOP_K, None)
        wanted = wanted + 0.5 * load.balance() * len(together) / tokens * LABELS
    wanted.backward()
    torch.testing.assert_close(torch.stack([total for total, _ in found]).sum(), wanted.detach(), rtol=1e-6, atol=0)
    for (rank, number), leaf in leaves.items():
        torch.testing.assert_close(found[rank][1][number], leaf.grad, rtol=1e-5, atol=1e-8)
