"""SFTTrainer: rows of every format, what is learned of them, and the losses of stock Trainer on the same tokens."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from datasets import Dataset

from automodel import SFTConfig, SFTTrainer, TrainingArguments
from automodel.config.errors import UserError
from automodel.trainer import sft_rows
from automodel.trainer.sft import _as_they_are
from automodel.trainer.sft_packing import FlatCollator, packed_rows
from automodel.trainer.sft_rows import RowFormat, prepared
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
    row = form(max_length=3, completion_only=True)({"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]})
    assert row == {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, -100, 7]}
    assert learned(form(formatting=lambda row: f"the {row['a']}")({"a": "film"})) == "the film [SEP]"
    with pytest.raises(UserError, match="a row has the columns story"):
        form()({"story": "the film"})


@pytest.mark.parametrize(("most", "lengths"), [(None, [3, 4, 2]), (7, [3, 4]), (4, [3, 1]), (2, [2])])
def test_documents_of_a_row_that_is_cut(most, lengths):
    row = {"input_ids": list(range(5, 14)), "seq_lengths": [3, 4, 2]}
    assert form(max_length=most, apart=True)(row)["seq_lengths"] == lengths
    assert "seq_lengths" not in form(max_length=most)(row)


def test_given_labels_are_kept():
    row = form(max_length=3)({"input_ids": [5, 6, 7, 8], "labels": [-100, 60, 70, 80]})
    assert row == {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, 60, 70]}
    with pytest.raises(UserError, match="a row has 2 input_ids and 1 labels"):
        form()({"input_ids": [5, 6], "labels": [5]})


@pytest.mark.parametrize("made", [["the film"], [{"role": "user", "content": "the film"}], None])
def test_a_formatting_function_makes_one_text(made):
    with pytest.raises(UserError, match="formatting_func returned a"):
        form(formatting=lambda row: made)({"a": "film"})


def test_a_text_that_is_none_is_refused_in_words():
    with pytest.raises(UserError, match="`text` of a row is None, and no text"):
        form()({"text": None})


def test_tools_may_be_written_as_json():
    seen = []

    class Words:
        chat_template = "something"

        def apply_chat_template(self, messages, tools=None, **given):
            seen.append(tools)
            return {"input_ids": [5, 6]}

    tools = [{"type": "function", "function": {"name": "look"}}]
    made = RowFormat(Words(), "text", None, None, False)
    for given in (tools, json.dumps(tools), [], "[]", None, "null"):
        made({"messages": ANSWER, "tools": given})
    assert seen == [tools, tools, [], [], None, None]  # templates may tell an empty list from none


def test_rows_that_a_transform_computes_are_refused_in_words():
    rows = Dataset.from_list([{"text": "the film"}]).with_transform(lambda batch: batch)
    with pytest.raises(UserError, match="the training dataset computes its rows with a transform"):
        prepared(rows, form(), None, "training")


def test_a_prompt_that_ends_within_a_token(capsys, monkeypatch):
    """As byte-level tokenizers have it: a space belongs to the word behind it."""
    monkeypatch.setattr(sft_rows, "_said", [])

    class Words:
        eos_token_id, known = 0, ["", "q", " ", " a"]

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [self.known.index(part) for part in re.findall(r" ?\w+| ", text)]}

        def decode(self, ids):
            return "".join(self.known[i] for i in ids)

    made = RowFormat(Words(), "text", None, None, False)
    for prompt, completion in (("q ", "a"), ("q", " a")):
        row = made({"prompt": prompt, "completion": completion})
        assert row["input_ids"] == [1, 3, 0]
        assert row["labels"] == [-100, 3, 0]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "' ' at its end is something else there" in said


def test_adapters_around_adapters_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny("llama", "causal-lm", pad_token_id=0)[1], config)
    given = {"train_dataset": Dataset.from_list([{"text": "the film"}]), "processing_class": TOKENIZER}
    with pytest.raises(UserError, match="the model has adapters already"):
        SFTTrainer(model, SFTConfig(str(tmp_path), use_cpu=True), peft_config=config, **given)


@pytest.mark.parametrize(
    ("asked", "masks", "labels"),
    [
        ({}, {"completion_mask": [0, 1, 1]}, [5, 6, 7]),  # TRL looks at it only where it is asked for
        ({"completion_only": False}, {"completion_mask": [0, 1, 1]}, [5, 6, 7]),
        ({"completion_only": True}, {"completion_mask": [0, 1, 1]}, [-100, 6, 7]),
        ({}, {"assistant_masks": [0, 0, 1]}, [-100, -100, 7]),  # and at this one wherever it is
        ({"completion_only": True}, {"completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}, [-100, 6, -100]),
    ],
)
def test_masks_beside_tokens(asked, masks, labels):
    assert form(**asked)({"input_ids": [5, 6, 7], **masks})["labels"] == labels


def test_rows_that_are_not_to_be_prepared():
    whole = _as_they_are(Dataset.from_list([{"input_ids": [5, 6, 7]}]), "training")
    assert whole[0]["labels"] == [5, 6, 7]
    own = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}])
    assert _as_they_are(own, "training") is own
    masked = Dataset.from_list([{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}])
    with pytest.raises(UserError, match="training dataset have masks and no `labels`, and skip_prepare_dataset leaves"):
        _as_they_are(masked, "training")


def test_packing_keeps_documents_whole_and_apart():
    rows = [{"input_ids": list(range(5, 5 + n)), "labels": list(range(5, 5 + n))} for n in (6, 3, 4, 2, 5)]
    packed = packed_rows(Dataset.from_list(rows), 8)
    assert sorted(sum(row["seq_lengths"]) for row in packed) == [4, 8, 8]
    assert sorted(n for row in packed for n in row["seq_lengths"]) == [2, 3, 4, 5, 6]
    batch = FlatCollator()(list(packed))
    starts = batch["position_ids"][0] == 0
    assert int(starts.sum()) == 5
    assert bool((batch["labels"][0][starts] == -100).all())


def test_packing_strategies():
    long, short = list(range(5, 25)), [30, 31, 32]
    rows = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in (long, short)])
    assert packed_rows(rows, 8)["seq_lengths"] == [[8], [3]]
    assert packed_rows(rows, 8, "bfd_split")["seq_lengths"] == [[8], [8], [4, 3]]
    wrapped = packed_rows(rows, 8, "wrapped")
    assert [token for ids in wrapped["input_ids"] for token in ids] == long + short
    assert [len(ids) for ids in wrapped["input_ids"]] == [8, 8, 7]
    assert "seq_lengths" not in wrapped.column_names


def test_rows_of_which_nothing_is_learned_are_left_out_and_counted(capsys):
    rows = Dataset.from_list([
        {"prompt": "what is good ? ", "completion": "the film"},
        {"prompt": "what is the very quite good film ? ", "completion": "a plot"},
    ])  # fmt: skip
    made = prepared(rows, form(max_length=6), None, "training")
    assert len(made) == 1
    assert "1 rows of the training dataset have nothing to learn" in capsys.readouterr().err
    with pytest.raises(UserError, match="nothing is learned from any of the 2 rows"):
        prepared(rows, form(max_length=2), None, "training")


def test_shared_conversations_by_their_older_names_and_what_rows_say_to_the_template():
    older = [{"from": "human", "value": "what is good ?"}, {"from": "gpt", "value": "the film ."}]
    assert form()({"conversations": older}) == form()({"messages": ANSWER})
    seen = []

    class Words:
        chat_template, eos_token_id = "x", 3

        def apply_chat_template(self, messages, **options):
            seen.append(options)
            return {"input_ids": [5]}

    talk = RowFormat(Words(), "text", 8, None, False)
    talk({"messages": ANSWER, "tools": [{"name": "add"}], "chat_template_kwargs": {"thinks": False}})
    assert seen[0]["tools"] == [{"name": "add"}]
    assert seen[0]["thinks"] is False


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
    assert trainer.acceleration.path == "packed"


def test_arguments_of_trl():
    config = SFTConfig("out", max_seq_length=77, use_cpu=True)
    assert (config.max_length, config.learning_rate, config.bf16, config.packing) == (77, 2e-5, False, False)
    with pytest.raises(UserError, match="chat_template_path"):
        SFTConfig("out", chat_template_path="x", use_cpu=True)
    wrong = {
        "loss_type='dft'": {"loss_type": "dft"},
        "packing_strategy='ffd'": {"packing_strategy": "ffd"},
        "truncation_mode='keep_end'": {"truncation_mode": "keep_end"},
        "needs max_length": {"packing": True, "max_length": None},
        "eval_packing=True": {"eval_packing": True},
        "prepare is unknown": {"dataset_kwargs": {"prepare": False}},
    }
    for said, given in wrong.items():
        with pytest.raises(UserError, match=said):
            SFTConfig("out", use_cpu=True, **given)


def test_rows_that_are_ready_tokens_that_are_named_and_what_is_refused(tmp_path):
    model = tiny("llama", "causal-lm", pad_token_id=0)[1]
    ready = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}] * 4)
    config = SFTConfig(
        str(tmp_path), dataset_kwargs={"skip_prepare_dataset": True}, eos_token="good", pad_token="[PAD]", **SETTINGS
    )
    words = make_tokenizer(decoder=True)
    trainer = SFTTrainer(model, config, train_dataset=ready, processing_class=words)
    assert trainer.train_dataset is ready
    assert words.eos_token == "good"
    bad = SFTConfig(str(tmp_path), eos_token="<no>", use_cpu=True)
    with pytest.raises(UserError, match=r"eos_token='<no>'.*no such token"):
        SFTTrainer(model, bad, train_dataset=ready, processing_class=words)
    with pytest.raises(UserError, match="given by its name"):
        SFTTrainer(model, config, train_dataset=ready, processing_class=words, quantization_config=object())
    config = SFTConfig(str(tmp_path), completion_only_loss=True, use_cpu=True)
    with pytest.raises(UserError, match="formatting_func makes one text"):
        SFTTrainer(model, config, train_dataset=data(), processing_class=words, formatting_func=str)
