"""Same data order, fp32, no dropout: fifty steps here and fifty steps of HF Trainer give the same losses."""

import json

import pytest
import torch

import tiny_runs as tiny

STEPS = 50


def trainer_losses(folder, model, rows, *, accumulation: int, batch: int, task: str):
    from torch.utils.data import SequentialSampler
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(model)
    auto = AutoModelForSequenceClassification if task == "text-classification" else AutoModelForCausalLM
    torch.manual_seed(42)
    stock = auto.from_pretrained(folder / "start")
    collator = DataCollatorWithPadding if task == "text-classification" else DataCollatorForSeq2Seq
    losses = []

    class Keep(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                losses.append(logs["loss"])

    class InOrder(Trainer):
        def _get_train_sampler(self, *args):
            return SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        output_dir=str(folder / "hf"), max_steps=STEPS, per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation, learning_rate=1e-3, weight_decay=0.01, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, max_grad_norm=1.0,
        logging_nan_inf_filter=False,
    )  # fmt: skip
    trainer = InOrder(
        model=stock, args=arguments, train_dataset=rows, data_collator=collator(tokenizer), callbacks=[Keep()]
    )
    trainer.train()
    return losses


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
"""


# Accumulation is compared on the causal LM and against itself below: transformers 5.22's Trainer multiplies loss and
# gradients of encoder classifiers by the accumulation steps (their forward takes kwargs but ignores the item count).
@pytest.mark.parametrize("kind", ["bert", "distilbert"])
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
    theirs = trainer_losses(tmp_path, model, tokenised, accumulation=1, batch=batch, task="text-classification")
    ours = our_losses(
        tmp_path,
        f"task: text-classification\nmodel: {tmp_path}/start\ndataset: {{path: {tmp_path}/train.jsonl}}\n"
        + COMMON.format(batch=batch, accumulation=1, folder=tmp_path),
    )
    assert len(ours) == len(theirs) == STEPS
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
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
    theirs = trainer_losses(tmp_path, model, theirs_rows, accumulation=2, batch=4, task="causal-lm")
    ours = our_losses(
        tmp_path,
        f"task: causal-lm\nmodel: {tmp_path}/start\ndataset: {{path: {tmp_path}/train.jsonl}}\n"
        + COMMON.format(batch=4, accumulation=2, folder=tmp_path),
    )
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
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
