"""Mixtures of experts: losses of whole runs are those of stock transformers, the router's own loss included.

The balance loss (`output_router_logits: true`) is one of each micro-batch; with one of them in a step it is exactly
what transformers adds.
"""

from __future__ import annotations

import json
import os
import random

import pytest
import torch
import yaml

import tiny_runs as tiny
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 128, "eos_token_id": 3, "bos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}


def mixture(folder, kind):
    import transformers

    tokenizer = tiny.make_tokenizer(decoder=True)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), router_aux_loss_coef=0.3, **SIZES, **KINDS[kind]
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def stock_losses(folder, rows, router):
    """Four steps of plain AdamW over the rows in their order, four at a time."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, output_router_logits=router)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for start in range(0, len(rows), 4):
        texts = [tokenizer(row)["input_ids"] + [tokenizer.eos_token_id] for row in rows[start : start + 4]]
        batch = tokenizer.pad({"input_ids": texts}, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("router", [False, True])
def test_losses_are_those_of_transformers(tmp_path, monkeypatch, kind, router):
    monkeypatch.chdir(tmp_path)
    folder = mixture(tmp_path / "model", kind)
    drawn = random.Random(1)
    rows = [" ".join(drawn.choices(tiny.GOOD + tiny.NEUTRAL, k=drawn.randint(3, 20))) for _ in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    run = {
        "model": {"name": os.fspath(folder), "output_router_logits": router},
        "task": "causal-lm",
        "dataset": {"path": "rows.jsonl"},
        "validation_dataset": {"path": "rows.jsonl"},
        "dataloader": {"batch_size": 4, "shuffle": False, "group_by_length": False},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
        "lr_scheduler": {"name": "constant"},
        "step_scheduler": {"num_epochs": 1, "log_every_steps": 1},
        "training_optimizations": {"precision": "fp32", "gradient_clipping": 1.0},
        "checkpoint": {"enabled": False},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    finetune(load_run_config([tmp_path / "run.yaml"]))
    lines = [json.loads(line) for line in (tmp_path / "checkpoints/run/metrics.jsonl").read_text().splitlines()]
    ours = [line["loss"] for line in lines if line["split"] == "train"]
    assert ours == pytest.approx(stock_losses(folder, rows, router), rel=1e-5)
    held_out = next(line["loss"] for line in lines if line["split"] != "train")
    assert held_out < ours[0] - (0.5 if router else 0.0), "an evaluation has no part of the router's loss"
    decisions = json.loads((tmp_path / "checkpoints/run/plan.json").read_text())["decisions"]
    plan = {line["name"]: line["value"] for line in decisions}
    assert plan["router"] == ("balance loss, weight 0.3" if router else "no balance loss")
