"""SFTTrainer: rows of every format, what is learned of them, and the losses of stock Trainer on the same tokens."""

from __future__ import annotations

import pytest
import torch
import transformers
from datasets import Dataset

from automodel import SFTConfig, SFTTrainer, TrainingArguments
from automodel.config.errors import UserError
from automodel.trainer.sft_rows import FlatCollator, RowFormat, packed_rows
from tiny_models import tiny
from tiny_runs import make_tokenizer, reviews

TOKENIZER = make_tokenizer(decoder=True)
ANSWER = [{"role": "user", "content": "what is good ?"}, {"role": "assistant", "content": "the film ."}]


def form(**options):
    settings = {"text_field": "text", "max_length": 64, "completion_only": None, "assistant_only": False, **options}
    return RowFormat(TOKENIZER, **settings)


def learned(row):
    return TOKENIZER.decode([i for i, label in zip(row["input_ids"], row["labels"]) if label != -100])


def test_texts_are_learned_whole_with_an_end():
    row = form()({"text": "the plot was good"})
    assert row["labels"] == row["input_ids"]
    assert row["input_ids"][-1] == TOKENIZER.eos_token_id


def test_completions_alone_unless_told_otherwise():
    row = {"prompt": "what is good ? ", "completion": "the film"}
    assert learned(form()(row)) == "the film [SEP]"
    assert learned(form(completion_only=False)(row)) == "what is good ? the film [SEP]"
    chat = {"prompt": ANSWER[:1], "completion": ANSWER[1:]}
    assert learned(form()(chat)).startswith("the film .")


def test_answers_of_a_conversation():
    whole = form()({"messages": ANSWER})
    assert "user" in learned(whole)
    assert learned(form(assistant_only=True)({"messages": ANSWER})) == "the film . [SEP]"
    with pytest.raises(UserError, match="assistant_only_loss needs conversations"):
        form(assistant_only=True)({"text": "the film"})


def test_tokens_formats_and_limits():
    row = form(max_length=3)({"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]})
    assert row == {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, -100, 7]}
    assert learned(form(formatting=lambda row: f"the {row['a']}")({"a": "film"})) == "the film [SEP]"
    with pytest.raises(UserError, match="a row has the columns story"):
        form()({"story": "the film"})


def test_packing_keeps_documents_whole_and_apart():
    rows = [{"input_ids": list(range(5, 5 + n)), "labels": list(range(5, 5 + n))} for n in (6, 3, 4, 2, 5)]
    packed = packed_rows(Dataset.from_list(rows), 8)
    assert sorted(sum(row["seq_lengths"]) for row in packed) == [4, 8, 8]
    assert sorted(n for row in packed for n in row["seq_lengths"]) == [2, 3, 4, 5, 6]
    batch = FlatCollator()(list(packed))
    starts = batch["position_ids"][0] == 0
    assert int(starts.sum()) == 5
    assert bool((batch["labels"][0][starts] == -100).all())


def data(count=24, seed=0):
    return Dataset.from_list([{"text": row["text"]} for row in reviews(count, seed)])


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


SETTINGS = {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "use_cpu": True, "report_to": "none",
            "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3}  # fmt: skip


def test_the_losses_of_stock_trainer_on_the_same_tokens(tmp_path):
    def model():
        return tiny("llama", "causal-lm", pad_token_id=0)[1]

    trainer = SFTTrainer(model(), SFTConfig(str(tmp_path), max_length=16, **SETTINGS), train_dataset=data(),
                         processing_class=TOKENIZER)  # fmt: skip
    ours = losses(trainer)
    assert trainer.acceleration.path == "packed"
    stock = transformers.Trainer(
        model(), TrainingArguments(str(tmp_path), **SETTINGS), transformers.DataCollatorForSeq2Seq(TOKENIZER),
        data().map(form(max_length=16), remove_columns=["text"]), processing_class=TOKENIZER,
    )  # fmt: skip
    assert ours == pytest.approx(losses(stock), abs=1e-4)


def test_packed_rows_have_the_loss_of_their_documents(tmp_path):
    model = tiny("llama", "causal-lm", pad_token_id=0)[1]
    one_step = SETTINGS | {"max_steps": 1, "per_device_train_batch_size": 50}
    config = SFTConfig(str(tmp_path), packing=True, max_length=40, **one_step)
    trainer = SFTTrainer(model, config, train_dataset=data(), processing_class=TOKENIZER)
    total, count = 0.0, 0
    with torch.no_grad():
        for row in data().map(form(max_length=40)):
            ids = torch.tensor([row["input_ids"]])
            total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    assert losses(trainer) == pytest.approx([total / count], abs=1e-4)
    assert trainer.acceleration.path == "stock"


def test_arguments_of_trl():
    config = SFTConfig("out", max_seq_length=77, use_cpu=True)
    assert (config.max_length, config.learning_rate, config.bf16, config.packing) == (77, 2e-5, False, False)
    with pytest.raises(UserError, match="chat_template_path"):
        SFTConfig("out", chat_template_path="x", use_cpu=True)
    with pytest.raises(UserError, match="loss_type='dft'"):
        SFTConfig("out", loss_type="dft", use_cpu=True)
