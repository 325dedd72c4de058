"""The drop-in Trainer against transformers' own: the same rows, losses, rates, evaluations and weights."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    TrainerCallback,
)

from automodel.trainer.arguments import TrainingArguments
from automodel.trainer.trainer import Trainer
from tiny_models import tiny
from tiny_runs import make_tokenizer

CLASSES = 3


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_look_through():
    """accelerate collects garbage before every training, and half a million imported objects take 0.2 s each time."""
    gc.freeze()
    yield
    gc.unfreeze()


TOLERANCE = 1e-4


def rows_of(task: str, count: int = 44, pad_to: int | None = None, seed: int = 0) -> Dataset:
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(random.integers(3, 24))
        ids = random.integers(5, 40, length).tolist()
        row: dict = {"input_ids": ids, "attention_mask": [1] * length}
        if pad_to is not None:
            row = {"input_ids": ids + [0] * (pad_to - length), "attention_mask": [1] * length + [0] * (pad_to - length)}
        if task == "text-classification":
            row["label"] = int(ids[0] % CLASSES)
        elif task == "token-classification":
            row["labels"] = [-100 if i % 4 == 0 else int(t % CLASSES) for i, t in enumerate(ids)]
        rows.append(row)
    return Dataset.from_list(rows)


COLLATORS = {
    "text-classification": DataCollatorWithPadding,
    "token-classification": DataCollatorForTokenClassification,
    "causal-lm": lambda tokenizer: DataCollatorForLanguageModeling(tokenizer, mlm=False),
}


def trained(
    kind, folder, task, family, *, dataset=None, collator=None, callbacks=(), more=None, resume=None, **options
):
    """A trainer of a class after its training."""
    pad = {} if more and "pad_token_id" in more else {"pad_token_id": 0}
    _, model = tiny(family, task, **pad, **_labels(task))
    tokenizer = make_tokenizer(decoder=task == "causal-lm")
    settings = {
        "max_steps": 9, "per_device_train_batch_size": 5, "learning_rate": 1e-3, "logging_steps": 1,
        "weight_decay": 0.01, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    } | options  # fmt: skip
    trainer = kind(
        model=model,
        args=TrainingArguments(str(folder), **settings),
        train_dataset=dataset or rows_of(task),
        eval_dataset=rows_of(task, 11, seed=1),
        data_collator=collator or COLLATORS[task](tokenizer),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        **{key: value for key, value in (more or {}).items() if key != "pad_token_id"},
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _labels(task):
    return {} if task == "causal-lm" else {"num_labels": CLASSES}


def same(ours, stock, tolerance=TOLERANCE, weights=True):
    """Everything that Trainer logs, and the weights that it leaves."""
    timing = ("runtime", "per_second", "preparation_time")
    assert len(ours.state.log_history) == len(stock.state.log_history)
    for mine, theirs in zip(ours.state.log_history, stock.state.log_history):
        assert mine.keys() == theirs.keys()
        for key in theirs:
            if not any(word in key for word in timing):
                assert mine[key] == pytest.approx(theirs[key], abs=tolerance, rel=tolerance), key
    assert ours.state.global_step == stock.state.global_step
    theirs = stock.model.state_dict() if weights else {}
    for name, tensor in ours.model.state_dict().items() if weights else ():
        torch.testing.assert_close(tensor, theirs[name], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("task", "family"),
    [
        ("text-classification", "bert"),
        ("text-classification", "distilbert"),
        ("text-classification", "llama"),
        ("token-classification", "roberta"),
        ("causal-lm", "llama"),
        ("causal-lm", "gpt2"),
    ],
)
def test_losses_rates_norms_and_weights_are_the_same(tmp_path, task, family):
    options = {"eval_strategy": "steps", "eval_steps": 4, "warmup_steps": 3, "lr_scheduler_type": "cosine"}
    ours = trained(Trainer, tmp_path / "a", task, family, **options)
    stock = trained(transformers.Trainer, tmp_path / "b", task, family, **options)
    assert ours.acceleration.path == "packed"
    same(ours, stock)


def test_a_pad_token_that_the_model_was_not_made_with_changes_no_position(tmp_path):
    own = {"pad_token_id": None}  # RoBERTa's is 1, the tokenizer's 0
    ours = trained(Trainer, tmp_path / "a", "token-classification", "roberta", more=own)
    stock = trained(transformers.Trainer, tmp_path / "b", "token-classification", "roberta", more=own)
    assert ours.acceleration.path == "stock"
    same(ours, stock)


def test_rows_that_are_padded_to_one_length(tmp_path):
    dataset = rows_of("text-classification", pad_to=32)
    collator = transformers.default_data_collator
    ours = trained(Trainer, tmp_path / "a", "text-classification", "distilbert", dataset=dataset, collator=collator)
    stock = trained(
        transformers.Trainer, tmp_path / "b", "text-classification", "distilbert", dataset=dataset, collator=collator
    )
    assert ours.acceleration.path == "packed"
    assert int(ours.state.total_flos) == int(stock.state.total_flos)
    same(ours, stock)


def test_accumulation_of_a_language_model_over_uneven_epochs(tmp_path):
    options = {"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 2, "logging_steps": 2}
    ours = trained(Trainer, tmp_path / "a", "causal-lm", "llama", **options)
    stock = trained(transformers.Trainer, tmp_path / "b", "causal-lm", "llama", **options)
    assert ours.acceleration.path == "packed"
    same(ours, stock)


@pytest.mark.parametrize("family", ["distilbert", "bert", "llama", "qwen2", "modernbert"])
def test_accumulation_of_a_classifier_is_weighted_as_trainer_weighs_it(tmp_path, family):
    """44 rows in batches of 4: every epoch ends with a step of fewer batches. With 5, the last batch is smaller."""
    for batch, path in ((4, "packed"), (5, "stock")):
        options = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": batch, "max_steps": 5}
        ours = trained(Trainer, tmp_path / "a", "text-classification", family, **options)
        stock = trained(transformers.Trainer, tmp_path / "b", "text-classification", family, **options)
        assert ours.acceleration.path == path
        same(ours, stock)


def test_checkpoints_best_model_and_early_stopping(tmp_path):
    options = {
        "max_steps": 20, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "load_best_model_at_end": True, "save_total_limit": 2, "learning_rate": 3e-2,
    }  # fmt: skip
    made = [
        trained(
            kind, tmp_path / str(n), "text-classification", "bert",
            callbacks=[EarlyStoppingCallback(early_stopping_patience=2)], **options,
        )
        for n, kind in enumerate((Trainer, transformers.Trainer))
    ]  # fmt: skip
    ours, stock = made
    assert ours.acceleration.path == "packed"
    assert ours.state.global_step < 20
    same(ours, stock, 1e-3, weights=False)  # rates this high let roundings grow
    assert ours.state.best_global_step == stock.state.best_global_step
    names = [sorted(p.name for p in (tmp_path / str(n)).iterdir()) for n in (0, 1)]
    assert names[0] == names[1]
    inner = [sorted(p.name for p in (tmp_path / str(n) / names[0][0]).iterdir()) for n in (0, 1)]
    assert inner[0] == inner[1]


def test_resume_goes_on_as_if_nothing_had_happened_from_either_trainers_checkpoint(tmp_path):
    options = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6, "per_device_train_batch_size": 7}
    whole = {}
    for name, kind in (("ours", Trainer), ("stock", transformers.Trainer)):
        whole[name] = trained(kind, tmp_path / name, "text-classification", "bert", **options)
    for writer in whole:
        again = trained(
            Trainer, tmp_path / f"again-{writer}", "text-classification", "bert",
            resume=str(tmp_path / writer / "checkpoint-6"), **options,
        )  # fmt: skip
        assert again.acceleration.path == "packed"
        losses = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
        expected = [entry["loss"] for entry in whole["stock"].state.log_history if "loss" in entry]
        assert losses == pytest.approx(expected, abs=TOLERANCE)


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 2.0, 0.5])
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weights)
        return (loss, outputs) if return_outputs else loss


class StockWeighted(transformers.Trainer):
    compute_loss = Weighted.compute_loss


def test_an_own_loss_is_called_in_trainers_own_steps(tmp_path, capsys):
    ours = trained(Weighted, tmp_path / "a", "text-classification", "bert")
    stock = trained(StockWeighted, tmp_path / "b", "text-classification", "bert")
    assert ours.acceleration.path == "stock"
    assert "Weighted has a compute_loss of its own" in capsys.readouterr().err
    same(ours, stock)


class LooksAtGradients(TrainerCallback):
    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.norms.append(float(sum(p.grad.norm() for p in model.parameters() if p.grad is not None)))


def test_a_callback_that_looks_inside_a_step_finds_gradients(tmp_path):
    watcher = LooksAtGradients()
    ours = trained(Trainer, tmp_path / "a", "text-classification", "bert", callbacks=[watcher])
    assert ours.acceleration.path == "stock"
    assert len(watcher.norms) == 9
    assert min(watcher.norms) > 0


def test_predictions_and_metrics(tmp_path):
    def accuracy(predictions):
        return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}

    made = []
    for name, kind in (("a", Trainer), ("b", transformers.Trainer)):
        made.append(
            trained(
                kind,
                tmp_path / name,
                "text-classification",
                "bert",
                more={"compute_metrics": accuracy},
                eval_strategy="epoch",
                max_steps=-1,
                num_train_epochs=2,
            )
        )
    ours, stock = made
    same(ours, stock)
    assert "eval_accuracy" in ours.state.log_history[-2]
    test = rows_of("text-classification", 9, seed=5)
    np.testing.assert_allclose(ours.predict(test).predictions, stock.predict(test).predictions, atol=1e-3)


def test_a_second_call_of_train_goes_on_as_stock_does(tmp_path):
    losses = []
    for name, kind in (("a", Trainer), ("b", transformers.Trainer)):
        trainer = trained(kind, tmp_path / name, "causal-lm", "llama", max_steps=3)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)


def test_bf16_evaluates_under_autocast_and_leaves_full_precision_weights(tmp_path):
    options = {"bf16": True, "eval_strategy": "steps", "eval_steps": 3, "max_steps": 6}
    ours = trained(Trainer, tmp_path / "a", "text-classification", "bert", **options)
    stock = trained(transformers.Trainer, tmp_path / "b", "text-classification", "bert", **options)
    assert ours.acceleration.path == "packed"
    same(ours, stock, 2e-2, weights=False)
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}
    ours.train()  # once more, from a model that accelerate has wrapped
    assert ours.acceleration.path == "packed"


def test_a_callback_that_generates_text_finds_a_model_that_does(tmp_path):
    class Samples(TrainerCallback):
        def __init__(self):
            self.made = []

        def on_evaluate(self, args, state, control, model=None, **kwargs):
            start = torch.tensor([[5, 6, 7]])
            self.made.append(model.generate(start, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist())

    made = []
    for name, kind in (("a", Trainer), ("b", transformers.Trainer)):
        samples = Samples()
        options = {"eval_strategy": "steps", "eval_steps": 3}
        trained(kind, tmp_path / name, "causal-lm", "llama", callbacks=[samples], **options)
        made.append(samples.made)
    assert made[0] == made[1]
    assert len(made[0]) == 3
