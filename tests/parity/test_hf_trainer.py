"""Same data order, fp32, no dropout: fifty steps here and fifty steps of HF Trainer give the same losses."""

import json

import pytest
import torch

import tiny_models
import tiny_runs as tiny
from hf_trainer import trainer_losses
from tiers import quick

STEPS = 50


def our_losses(folder, text: str):
    run = folder / "run.yaml"
    run.write_text(text)
    tiny.automodel("finetune", "llm", "-c", run, AUTOMODEL_CACHE=str(folder / "cache"))
    return list(tiny.losses(folder / "out").values())


COMMON = """
dataloader: {{shuffle: false, batch_size: {batch}}}
optimizer: {{lr: 1e-3, weight_decay: 0.01}}
step_scheduler: {{max_steps: 50, log_every_steps: 1, grad_acc_steps: {accumulation}}}
checkpoint: {{checkpoint_dir: {folder}/out}}
training_optimizations: {{precision: fp32}}
"""


# Accumulation is compared on the causal LM and against itself below: transformers 5.22's Trainer multiplies loss and
# gradients of encoder classifiers by the accumulation steps (their forward takes kwargs but ignores the item count).
@pytest.mark.parametrize("kind", quick(["bert", "distilbert"], "distilbert"))
def test_classification_losses_equal_hf_trainer(tmp_path, kind):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = tiny.make_model_folder(tmp_path / "model", kind)
    rows = tiny.reviews(96)
    tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    torch.manual_seed(7)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=2).save_pretrained(tmp_path / "start")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(tmp_path / "start")
    tokenised = [{**tokenizer(r["text"]), "labels": r["label"]} for r in rows]
    batch = 8
    theirs = trainer_losses(
        tmp_path, model, tokenised, accumulation=1, batch=batch, task="text-classification", steps=STEPS
    )
    ours = our_losses(
        tmp_path,
        f"task: text-classification\nmodel: {tmp_path}/start\ndataset: {{path: {tmp_path}/train.jsonl}}\n"
        + COMMON.format(batch=batch, accumulation=1, folder=tmp_path),
    )
    assert len(ours) == len(theirs) == STEPS
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[-1] < ours[0] * 0.9, "nothing was learned, so equality would prove little"


def test_causal_lm_losses_equal_hf_trainer(tmp_path):
    from transformers import AutoTokenizer

    model = tiny.make_model_folder(tmp_path / "start", "llama")
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = []
    for review in tiny.reviews(96):
        ids = tokenizer(review["text"])["input_ids"]
        cut = len(ids) // 2
        rows.append({"input_ids": ids, "labels": [-100] * cut + ids[cut:]})
    tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    theirs_rows = [{**r, "attention_mask": [1] * len(r["input_ids"])} for r in rows]
    theirs = trainer_losses(tmp_path, model, theirs_rows, accumulation=2, batch=4, task="causal-lm", steps=STEPS)
    ours = our_losses(
        tmp_path,
        f"task: causal-lm\nmodel: {tmp_path}/start\ndataset: {{path: {tmp_path}/train.jsonl}}\n"
        + COMMON.format(batch=4, accumulation=2, folder=tmp_path),
    )
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[-1] < ours[0] * 0.95


def test_accumulation_is_exact(tmp_path):
    """1 × 8, 8 × 1 and 4 × 2 give the same losses: sums over the step, divided once."""
    tiny.write_run(tmp_path)
    curves = {}
    for batch, accumulation in ((8, 1), (1, 8), (4, 2)):
        out = tmp_path / f"out-{batch}"
        tiny.automodel(
            "finetune", "llm", "-c", tmp_path / "run.yaml", f"dataloader.batch_size={batch}",
            f"step_scheduler.grad_acc_steps={accumulation}", "step_scheduler.max_steps=12",
            "step_scheduler.log_every_steps=1", f"checkpoint.checkpoint_dir={out}",
            AUTOMODEL_CACHE=str(tmp_path / "cache"),
        )  # fmt: skip
        curves[batch] = tiny.losses(out)
        assert json.loads((out / "run" / "plan.json").read_text())["global_batch_size"] == 8
    assert curves[1] == pytest.approx(curves[8], rel=1e-5)
    assert curves[4] == pytest.approx(curves[8], rel=1e-5)


ARCHITECTURES = [
    "bert", "distilbert", "roberta", "electra", "albert", "modernbert", "llama", "mistral", "qwen2", "qwen3", "gemma",
    "gpt2",
]  # fmt: skip


@pytest.mark.parametrize("kind", quick(ARCHITECTURES, "bert", "albert", "modernbert", "qwen3", "gpt2"))
def test_every_architecture_classifies_to_the_same_losses(tmp_path, monkeypatch, kind):
    """In this process, for speed: the same engine, the same Trainer, twelve families."""
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tokenizer = tiny.make_tokenizer()
    _, model = tiny_models.tiny(kind, "text-classification", num_labels=2, pad_token_id=0)
    model.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    rows = [{"input_ids": tokenizer(r["text"])["input_ids"], "label": r["label"]} for r in tiny.reviews(96)]
    tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    tokenised = [{"input_ids": r["input_ids"], "labels": r["label"]} for r in rows]
    theirs = trainer_losses(
        tmp_path, tmp_path / "start", tokenised, accumulation=1, batch=8, task="text-classification", steps=STEPS
    )
    (tmp_path / "run.yaml").write_text(
        f"task: text-classification\nmodel: {tmp_path}/start\ndataset: {{path: {tmp_path}/train.jsonl}}\n"
        + COMMON.format(batch=8, accumulation=1, folder=tmp_path)
    )
    finetune(load_run_config([tmp_path / "run.yaml"]))
    ours = list(tiny.losses(tmp_path / "out").values())
    assert ours == pytest.approx(theirs, rel=1e-4)
    plan = json.loads((tmp_path / "out" / "run" / "plan.json").read_text())
    assert plan["path"] == "packed"
