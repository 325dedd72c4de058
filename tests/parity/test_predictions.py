"""What a Trainer predicts, padding included: `predict`, `evaluate` and both hooks for metrics get the numbers of stock
transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset

import automodel
from automodel.models.drop_in import path_taken
from drop_in_pairs import batch, both
from tiny_models import tiny
from tiny_runs import make_tokenizer

EXACT = {"rtol": 0.0, "atol": 1e-5}
TOKENIZER = make_tokenizer()
CASES = [
    ("causal-lm", "gpt2"), ("causal-lm", "llama"), ("token-classification", "bert"), ("token-classification", "llama"),
    ("token-classification", "roberta"),
]  # fmt: skip


def rows_of(task, count):
    draw, made = np.random.default_rng(0), []
    for _ in range(count):
        ids = draw.integers(5, 40, int(draw.integers(3, 16))).tolist()
        labels = ids if task == "causal-lm" else [token % 3 for token in ids]
        made.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return Dataset.from_list(made)


class Metrics:
    """Counts every position, as metrics do that forget to leave -100 out."""

    def __init__(self):
        self.seen, self.before = [], []

    def before_metrics(self, logits, labels):
        self.before.append(logits.float().mean().item())
        return logits

    def __call__(self, prediction):
        values = np.asarray(prediction.predictions)
        self.seen.append(values)
        return {
            "highest": float((values.argmax(-1) == prediction.label_ids).mean()),
            "square": float((values**2).mean()),
        }


def trained(home, task, family, folder, **settings):
    transformers.set_seed(0)
    labels = {} if task == "causal-lm" else {"num_labels": 3}
    collators = {"causal-lm": transformers.DataCollatorForSeq2Seq}
    collator = collators.get(task, transformers.DataCollatorForTokenClassification)(TOKENIZER)
    metrics = Metrics()
    given = {
        "max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "eval_strategy": "steps",
        "eval_steps": 2, "logging_steps": 1, "use_cpu": True, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "learning_rate": 1e-3,
    }  # fmt: skip
    trainer = home.Trainer(
        model=tiny(family, task, pad_token_id=TOKENIZER.pad_token_id, **labels)[1],
        args=home.TrainingArguments(str(folder), **given | settings),
        train_dataset=rows_of(task, 16), eval_dataset=rows_of(task, 10), data_collator=collator,
        processing_class=TOKENIZER, compute_metrics=metrics, preprocess_logits_for_metrics=metrics.before_metrics,
    )  # fmt: skip
    trainer.evaluate()
    trainer.train()
    return trainer, metrics


@pytest.mark.parametrize(("task", "family"), CASES)
def test_predictions_and_metrics_are_those_of_stock_at_every_position(task, family, tmp_path):
    """Before training, in it and after it."""
    found = []
    for home in (automodel, transformers):
        trainer, metrics = trained(home, task, family, tmp_path)
        predicted = trainer.predict(rows_of(task, 16))
        logged = [e["eval_square"] for e in trainer.state.log_history if "eval_square" in e]
        found.append((predicted, metrics, logged, trainer))
    (ours, metrics, logged, trainer), (theirs, stock_metrics, stock_logged, _) = found
    assert trainer.acceleration.path == "packed"
    assert not (np.asarray(theirs.predictions) == 0).any()
    np.testing.assert_allclose(ours.predictions, theirs.predictions, **EXACT)
    assert len(metrics.seen) == len(stock_metrics.seen) == 4
    for mine, expected in zip(metrics.seen, stock_metrics.seen):
        np.testing.assert_allclose(mine, expected, **EXACT)
    assert metrics.before == pytest.approx(stock_metrics.before, abs=1e-5)
    assert logged == pytest.approx(stock_logged, rel=1e-5)
    assert ours.metrics["test_highest"] == theirs.metrics["test_highest"]


@pytest.mark.parametrize(("task", "family"), [CASES[0], CASES[2]])
def test_an_evaluation_of_the_loss_alone_still_takes_padding_out(task, family, tmp_path):
    losses = []
    for home in (automodel, transformers):
        trainer = trained(home, task, family, tmp_path, max_steps=1, prediction_loss_only=True)[0]
        losses.append(trainer.evaluate()["eval_loss"])
        if home is automodel:
            assert path_taken(trainer.model)[0] == "packed"
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_loss_of_the_scripts_own_is_evaluated_on_real_logits(tmp_path):
    """It reads logits where the Trainer does not."""

    def unmasked(home):
        class Unmasked(home.Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(**inputs)
                loss = outputs.logits.square().mean()
                return (loss, outputs) if return_outputs else loss

        class Home:
            Trainer, TrainingArguments = Unmasked, home.TrainingArguments

        return Home

    losses = [
        trained(unmasked(home), *CASES[2], tmp_path, max_steps=1, learning_rate=0.0, prediction_loss_only=True)[0]
        .evaluate()["eval_loss"]
        for home in (automodel, transformers)
    ]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("with_labels", [True, False])
@pytest.mark.parametrize(("task", "family"), [CASES[1], CASES[2]])
def test_a_loop_of_ones_own_sees_real_logits(task, family, with_labels, tmp_path):
    tiny(family, task, pad_token_id=0, **({"num_labels": 3} if task != "causal-lm" else {}))[1].save_pretrained(
        tmp_path
    )
    stock, ours = (model.eval() for model in both(tmp_path, task))
    inputs = batch(task)
    if not with_labels:
        del inputs["labels"]
    with torch.no_grad():
        expected, found = (model(**inputs).logits for model in (stock, ours))
    torch.testing.assert_close(found, expected, **EXACT)
