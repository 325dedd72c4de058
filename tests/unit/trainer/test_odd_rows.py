"""Rows that are odd but allowed, and rows that are wrong: what stock Trainer makes of them is what ours makes."""

from __future__ import annotations

import weakref

import pytest
import torch
import transformers
from datasets import Dataset

from automodel.trainer.arguments import TrainingArguments
from automodel.trainer.trainer import Trainer
from tiny_models import tiny
from tiny_runs import make_tokenizer

SETTINGS = {
    "max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1, "use_cpu": True, "report_to": "none",
    "disable_tqdm": True, "save_strategy": "no", "train_sampling_strategy": "sequential", "learning_rate": 1e-2,
}  # fmt: skip


def trained(kind, folder, family, task, rows, **options):
    extra = {"num_labels": 2} if task == "text-classification" else {}
    model, words = tiny(family, task, pad_token_id=0, **extra)[1], make_tokenizer(decoder=family == "llama")
    collator = {"causal-lm": transformers.DataCollatorForSeq2Seq}.get(task, transformers.DataCollatorWithPadding)
    args = TrainingArguments(str(folder), **SETTINGS | options)
    trainer = kind(model, args, collator(words), Dataset.from_list(rows), processing_class=words)
    trainer.train()
    return trainer


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def test_a_batch_without_a_label_teaches_nothing_and_breaks_nothing(tmp_path):
    ids = [5, 6, 7, 8]
    rows = [{"input_ids": ids, "attention_mask": [1] * 4, "labels": [-100] * 4 if i < 4 else ids} for i in range(12)]
    for accumulation in (1, 2):
        options = {"gradient_accumulation_steps": accumulation}
        ours, stock = (
            trained(kind, tmp_path, "llama", "causal-lm", rows, **options) for kind in (Trainer, transformers.Trainer)
        )
        assert ours.acceleration.path == "packed"
        for key in ("loss", "grad_norm"):
            assert logged(ours, key) == pytest.approx(logged(stock, key), abs=1e-4, nan_ok=True), key
        for mine, theirs in zip(ours.model.parameters(), stock.model.parameters()):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_documents_without_a_label_are_left_to_trainer(tmp_path):
    rows = [
        {"input_ids": [5, 6, 7, 8], "attention_mask": [1] * 4, "label": -100 if i % 4 == 0 else i % 2}
        for i in range(12)
    ]  # fmt: skip
    ours, stock = (
        trained(kind, tmp_path, "bert", "text-classification", rows) for kind in (Trainer, transformers.Trainer)
    )
    assert "the label -100" in str(ours.acceleration)
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), abs=1e-5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"label": 7}, "row 3 has the label 7, and the model knows 0 to 1"),
        ({"input_ids": [5, 6, 700, 8]}, "row 3 has the token 700, and the model knows 0 to 98"),
    ],
)
def test_numbers_that_are_out_of_range_are_named_before_torch_fails(wrong, said, tmp_path, capsys):
    rows = [{"input_ids": [5, 6, 7, 8], "attention_mask": [1] * 4, "label": i % 2} for i in range(8)]
    rows[3] |= wrong
    with pytest.raises(IndexError):
        trained(Trainer, tmp_path, "bert", "text-classification", rows)
    assert said in capsys.readouterr().err


def test_cheap_dropout_is_gone_after_training_and_learns_as_well(tmp_path):
    rows = [{"input_ids": [5 + i % 2, 6, 7], "attention_mask": [1] * 3, "label": i % 2} for i in range(8)]
    model = tiny("bert", "text-classification", pad_token_id=0, num_labels=2, hidden_dropout_prob=0.2)[1]
    seen = []

    class Looks(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(type(held().bert.embeddings.dropout.forward).__name__)

    held = weakref.ref(model)  # which nobody finds by reading the callback's code
    args = TrainingArguments(str(tmp_path), **SETTINGS | {"max_steps": 60, "logging_steps": 20})
    collator = transformers.DataCollatorWithPadding(make_tokenizer())
    trainer = Trainer(model, args, collator, Dataset.from_list(rows), callbacks=[Looks()])
    trainer.train()
    assert trainer.acceleration.path == "packed"
    assert set(seen) == {"CheapDropout"}
    assert not any("forward" in module.__dict__ for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert logged(trainer, "loss")[-1] < 0.3


def test_an_optimizer_of_the_scripts_own_keeps_its_rates(tmp_path):
    rows = [{"input_ids": [5 + i % 3, 6, 7], "attention_mask": [1] * 3, "label": i % 2} for i in range(8)]

    def with_rates(kind):
        class Rates(kind):
            def create_optimizer(self, model=None):
                groups = [{"params": self.model.bert.parameters(), "lr": 0.01},
                          {"params": self.model.classifier.parameters(), "lr": 0.3}]  # fmt: skip
                self.optimizer = torch.optim.SGD(groups, momentum=0.9)
                return self.optimizer

        return Rates

    ours, stock = (
        trained(with_rates(kind), tmp_path, "bert", "text-classification", rows)
        for kind in (Trainer, transformers.Trainer)
    )
    assert ours.acceleration.path == "packed"
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(ours, key) == pytest.approx(logged(stock, key), abs=1e-4, rel=1e-4), key
