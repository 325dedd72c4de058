"""Datasets that nobody tokenised: the losses of the same rows with tokens, for datasets of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict

from automodel.data.batch import IGNORE
from automodel.trainer.arguments import TrainingArguments
from automodel.trainer.raw_rows import Tagged
from automodel.trainer.sft import SFTConfig, SFTTrainer
from automodel.trainer.trainer import Trainer
from tiny_models import tiny
from tiny_runs import make_tokenizer, reviews

SETTINGS = {
    "max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1, "use_cpu": True, "report_to": "none",
    "disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-2, "eval_strategy": "steps", "eval_steps": 3,
}  # fmt: skip


def trained(folder, family, task, dataset, collator=None, **extra):
    words = make_tokenizer(decoder=family == "llama")
    model = tiny(family, task, pad_token_id=0, **extra)[1]
    args = TrainingArguments(str(folder), **SETTINGS)
    trainer = Trainer(model, args, collator, dataset, dataset, processing_class=words)
    trainer.train()
    history = trainer.state.log_history
    return trainer, [[e[key] for e in history if key in e] for key in ("loss", "eval_loss")]


class Reviews(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_texts_of_every_kind_of_dataset(tmp_path, capsys):
    words, rows = make_tokenizer(), [{"text": r["text"], "label": r["label"]} for r in reviews(12)]
    ready = Dataset.from_list([{**words(r["text"]), "label": r["label"]} for r in rows])
    expected = trained(tmp_path, "bert", "text-classification", ready)[1]
    assert "tokenised" not in capsys.readouterr().err
    for dataset in (Dataset.from_list(rows), rows, Reviews(rows)):
        trainer, found = trained(tmp_path, "bert", "text-classification", dataset)
        assert trainer.acceleration.path == "packed"
        assert found == [pytest.approx(values, abs=1e-5) for values in expected]
        assert "the rows of the training dataset have no tokens, so they are tokenised" in capsys.readouterr().err
    stream = Dataset.from_list(rows).to_iterable_dataset()
    assert len(trained(tmp_path, "bert", "text-classification", stream)[1][0]) == 3


def test_predicting_and_evaluating_texts_afterwards(tmp_path):
    rows = [{"text": r["text"], "label": r["label"]} for r in reviews(16)]
    trainer = trained(tmp_path, "bert", "text-classification", Dataset.from_list(rows))[0]
    assert trainer.predict(Dataset.from_list([{"text": row["text"]} for row in rows[:5]])).predictions.shape[0] == 5
    assert trainer.evaluate(Dataset.from_list(rows[:5]))["eval_loss"] > 0
    parts = DatasetDict(a=Dataset.from_list(rows[:4]), b=trainer.train_dataset)
    several = Trainer(
        trainer.model, trainer.args, None, trainer.train_dataset, parts, processing_class=make_tokenizer()
    )
    assert several.eval_dataset["b"] is trainer.train_dataset
    assert "input_ids" in several.eval_dataset["a"].column_names
    assert several.evaluate()["eval_a_loss"] > 0


def test_pairs_tags_and_language_models(tmp_path):
    texts = [r["text"] for r in reviews(16)]
    pairs = Dataset.from_list([{"premise": t, "hypothesis": t[::-1], "label": i % 2} for i, t in enumerate(texts)])
    trainer, _ = trained(tmp_path, "bert", "text-classification", pairs, num_labels=2)
    assert trainer.train_dataset["input_ids"][0].count(make_tokenizer().sep_token_id) == 2
    tagged = Dataset.from_list([{"tokens": t.split(), "ner_tags": [len(w) % 3 for w in t.split()]} for t in texts])
    trainer, _ = trained(tmp_path, "bert", "token-classification", tagged, num_labels=3)
    first = trainer.train_dataset[0]
    assert first["labels"] == [-100, *first["ner_tags"], -100]
    plain = Dataset.from_list([{"text": t} for t in texts])
    trainer, found = trained(tmp_path, "llama", "causal-lm", plain)
    assert trainer.acceleration.path == "packed"
    config = SFTConfig(str(tmp_path), **SETTINGS | {"eval_strategy": "no", "eval_steps": None})
    tuned = SFTTrainer(tiny("llama", "causal-lm", pad_token_id=0)[1], config, train_dataset=plain,
                       processing_class=make_tokenizer(decoder=True))  # fmt: skip
    tuned.train()
    assert found[0] == pytest.approx([e["loss"] for e in tuned.state.log_history if "loss" in e], abs=1e-5)
    labelling = transformers.DataCollatorForLanguageModeling(make_tokenizer(decoder=True), mlm=False)
    trainer, same = trained(tmp_path, "llama", "causal-lm", plain, labelling)
    assert trainer.acceleration.path == "packed"
    assert len(same[0]) == len(found[0])
    assert "labels" not in trainer.train_dataset.column_names, "the collator makes them"
    talks = Dataset.from_list([{"messages": [{"role": "user", "content": t}]} for t in texts])
    assert len(trained(tmp_path, "llama", "causal-lm", talks)[1][0]) == 3


def test_what_cannot_be_told_fails_as_in_stock_trainer(tmp_path):
    odd = Dataset.from_list([{"story": r["text"], "label": r["label"]} for r in reviews(8)])
    with pytest.raises(ValueError, match="input_ids"):
        trained(tmp_path, "bert", "text-classification", odd)
    rows = Dataset.from_list([{"text": r["text"], "label": r["label"]} for r in reviews(8)])
    with pytest.raises((ValueError, KeyError)):
        trained(tmp_path, "bert", "text-classification", rows, transformers.default_data_collator)


def test_words_of_a_python_tokenizer():
    """Which does not say what word a token is a piece of."""
    form = Tagged(transformers.ByT5Tokenizer(), "tokens", "ner_tags", 5)
    made = form({"tokens": ["ab", "cde"], "ner_tags": [1, 2]})
    assert made["input_ids"] == [*(3 + ord(letter) for letter in "abcd"), 1]
    assert made["labels"] == [1, IGNORE, 2, IGNORE, IGNORE]


def test_words_are_not_glued_together(tmp_path):
    """Byte-level tokenizers put no space before the words of a list unless told to; the saved one is told, too."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["[PAD]", *letters])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]")
    rows = Dataset.from_list([{"tokens": ["ab", "c"], "ner_tags": [1, 0]}] * 4)
    model = tiny("bert", "token-classification", pad_token_id=0, vocab_size=300, num_labels=2)[1]
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **SETTINGS), None, rows, rows, processing_class=words)
    first = trainer.train_dataset[0]
    assert words.convert_ids_to_tokens(first["input_ids"]) == ["Ġ", "a", "b", "Ġ", "c"]
    assert first["labels"] == [1, IGNORE, IGNORE, 0, IGNORE]
    trainer.save_model(str(tmp_path / "saved"))
    saved: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved(["ab", "c"], is_split_into_words=True)["input_ids"] == first["input_ids"]
