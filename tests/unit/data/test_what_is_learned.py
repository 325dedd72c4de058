"""After everything was cut: what of the data a language model learns, and what is said where that is nothing."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.data.collate import PackedCollator
from automodel.data.samples import SampleWriter
from automodel.data.stats import Counter


@pytest.fixture
def lm(prepare_rows):
    def prepared(rows, tokenizer, **settings):
        return prepare_rows(rows, tokenizer, task=settings.pop("task", "causal-lm"), types=0, **settings)

    return prepared


def labels_in_batches(data) -> int:
    """Labels that a packed batch of everything counts: the truth that the statistics are compared with."""
    collate = PackedCollator(data.store, "next_token", micro_batch_size=len(data.store))
    return collate(range(len(data.store))).num_labels


@pytest.mark.parametrize("settings", [{}, {"answer_only_loss": False}, {"max_length": 12}])
def test_supervised_tokens_are_those_of_the_batches(lm, gpt_like, settings):
    rows = [{"prompt": "p" * (i % 7 + 1), "completion": "c" * (i % 11 + 1)} for i in range(40)]
    data = lm(rows, gpt_like, **settings)
    assert data.stats.supervised == labels_in_batches(data)
    assert 0 < data.stats.supervised < data.stats.tokens


def test_a_good_dataset_learns_every_end(lm, gpt_like, chat_like):
    data = lm([{"prompt": "ab", "completion": "cdef"}] * 5, gpt_like)
    assert (data.stats.supervised, data.stats.tokens, data.stats.ended, data.stats.unended) == (25, 35, 5, 0)
    assert data.stats.learned_in_words() == "71.4% of the tokens are learned, the end of every document among them"
    assert data.notes == ()
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    chats = lm([{"messages": talk}] * 3, chat_like, name="chats.jsonl")
    assert (chats.stats.ended, chats.stats.unended, chats.notes) == (3, 0, ())


def test_cut_answers_lose_their_end_and_the_plan_says_so(lm, gpt_like):
    rows = [{"prompt": "ab", "completion": "c" * (4 if i % 2 else 50)} for i in range(10)]
    data = lm(rows, gpt_like, max_length=16)
    assert (data.stats.ended, data.stats.truncated) == (5, 5)
    (note,) = data.notes
    assert note == (
        "the end is not learned in 5 of 10 rows, so the model may not learn to stop: they are cut at max_length 16; a "
        "larger one would keep it"
    )
    assert data.stats.learned_in_words().endswith("the end of 5 of 10 documents among them")
    (note,) = lm(rows, gpt_like, max_length=16, role="validation").notes
    assert note == (
        "validation_dataset: the end is not measured in 5 of 10 rows: they are cut at max_length 16; a larger one "
        "would keep it"
    )


def test_tokenised_rows_whose_labels_hold_no_end(lm, gpt_like):
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [IGNORE, IGNORE, 7, 8]}] * 4
    (note,) = lm(rows, gpt_like).notes
    assert note == (
        "the end is not learned in 4 of 4 rows, so the model may not learn to stop: no label there is '<|end|>' or "
        "another token that ends a text"
    )


def test_a_few_cut_rows_are_no_news(lm, gpt_like):
    rows = [{"prompt": "ab", "completion": "c" * (50 if i == 3 else 4)} for i in range(20)]
    assert lm(rows, gpt_like, max_length=16).notes == ()


def test_targets_of_seq2seq(lm, gpt_like):
    tokenizer = copy.deepcopy(gpt_like)
    data = lm([{"source": "abc", "target": "de"}] * 4, tokenizer, task="seq2seq")
    assert (data.stats.supervised, data.stats.ended) == (8, 0)  # this tokenizer adds no end of its own
    assert "the end is not learned in 4 of 4 rows" in data.notes[0]
    assert data.stats.learned_in_words(targets=True) == (
        "8 target tokens are learned, the end of 0 of 4 documents among them"
    )


def message_of(call) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def test_a_label_mask_that_covers_everything(lm, gpt_like):
    rows = [{"input_ids": [5, 6, 7], "labels": [IGNORE] * 3}] * 25
    message = message_of(lambda: lm(rows, gpt_like))
    assert message.startswith("dataset: 25 of 25 rows cannot be used (rows are counted from 0):\n  row 0: no token of ")
    assert message.count("\n  row ") == 20
    assert "\n  … and 5 more\n" in message
    first_only = [{"input_ids": [5, 6, 7], "labels": [5, IGNORE, IGNORE]}]  # nothing predicts a first token
    assert "row 0: no token of the row carries a label" in message_of(lambda: lm(first_only, gpt_like, name="b.jsonl"))


def test_conversations_without_anything_to_learn(lm, chat_like):
    asked = {"role": "user", "content": "hi"}
    rows = [
        {"messages": [asked]},
        {"messages": [asked, {"role": "assistant", "content": " "}]},
        {"messages": [asked, {"role": "assistant", "content": "yo"}]},
    ]
    message = message_of(lambda: lm(rows, chat_like))
    assert "row 0: the conversation has no assistant message" in message
    assert "row 1: the assistant's messages are empty, so there is nothing to learn" in message
    assert "row 2" not in message


def test_the_end_of_a_plain_template_is_learned(lm, gpt_like):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    data = lm([{"messages": talk}] * 3, gpt_like, chat_template="plain")
    assert data.stats.unended == 0


def test_a_template_that_refuses_every_row(lm, chat_like):
    tokenizer = copy.deepcopy(chat_like)
    tokenizer.chat_template = "{{ raise_exception('only system messages here') }}"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    message = message_of(lambda: lm([{"messages": talk}] * 2, tokenizer))
    assert "row 0: the chat template refuses the messages: only system messages here" in message
    assert "row 1: " in message


def test_every_column_that_is_not_there_is_named(lm, gpt_like):
    mapping = {"context": "ctx", "question": "qestion", "answer": "answr"}
    rows = [{"context": "c", "question": "q", "answer": "a"}]
    message = message_of(lambda: lm(rows, gpt_like, column_mapping=mapping))
    assert message.startswith("3 problems with the data\n- dataset.column_mapping: the data has no column 'ctx'")
    assert message.count("Did you mean") == 3


def test_limits_columns_and_rows_are_wrong_together(lm, gpt_like):
    rows = [{"prompt": "p", "completion": "c" if i % 2 else ""} for i in range(6)]
    message = message_of(lambda: lm(rows, gpt_like, max_length=4096, positions=128))
    assert message.startswith("2 problems with the data\n- dataset.max_length is 4,096, but the model has only 128")
    assert "- dataset: 3 of 6 rows cannot be used" in message
    message = message_of(lambda: lm(rows, gpt_like, max_length=4096, num_samples_limit=0, text_column="x"))
    assert message.startswith("3 problems with the data\n- dataset.num_samples_limit must be at least 1; got 0.")
    assert "the data has no column 'x'" in message


def test_targets_longer_than_the_decoder(lm, gpt_like):
    rows = [{"source": "abc", "target": "de"}]
    message = message_of(lambda: lm(rows, gpt_like, task="seq2seq", positions=64, max_target_length=128))
    assert message.startswith("dataset.max_target_length is 128, but the model has only 64 positions.")


def test_the_last_check_catches_what_an_encoder_let_through():
    writer = SampleWriter()
    writer.add(3, [1, 2, 3], token_labels=[IGNORE, 2, 3])
    writer.add(4, [1, 2, 3], token_labels=[1, IGNORE, IGNORE])
    counter = Counter("next_token", frozenset({3}))
    list(counter.watching([writer.finish()]))
    counter.rows = 2
    assert (counter.supervised, counter.ended) == (2, 1)
    for skip in (False, True):  # it is in the store already, so skipping it would be a lie
        message = message_of(lambda skip=skip: counter.check("dataset", skip))
        assert "row 4: no token of the sample is learned" in message


# --- long documents ---------------------------------------------------------------------------------------------------


def texts(data, tokenizer) -> list[str]:
    store = data.store
    return [tokenizer.decode(store.input_ids[a:b]) for a, b in zip(store.offsets, store.offsets[1:])]


def test_plain_text_is_split_by_default_and_cut_where_asked(lm, gpt_like):
    rows = [{"text": "abcdefghijklmnopqrstuvwxyz"}, {"text": "short"}]
    split = lm(rows, gpt_like, max_length=10)
    assert texts(split, gpt_like) == ["abcdefghij", "jklmnopqrs", "stuvwxyz<|end|>", "short<|end|>"]
    assert (split.stats.truncated, split.stats.ended, split.stats.unended) == (0, 2, 0)
    assert split.stats.supervised == labels_in_batches(split) == 26 + 5  # each token once, but the first of each text
    asked = lm(rows, gpt_like, max_length=10, on_long="split")
    assert np.array_equal(asked.store.input_ids, split.store.input_ids)
    cut = lm(rows, gpt_like, max_length=10, on_long="cut")
    assert (asked.splits, cut.splits) == (True, False)
    assert texts(cut, gpt_like) == ["abcdefghij", "short<|end|>"]
    assert (cut.stats.truncated, cut.stats.ended) == (1, 1)
    assert "cut where it is long" in cut.description
    assert "the end is not learned in 1 of 2 rows" in cut.notes[0]


def test_a_text_file_is_continued_pretraining(lm, gpt_like, tmp_path):
    (tmp_path / "book.txt").write_text("First line of a paragraph\nand its second.\n\nAnother paragraph.\n")
    data = lm(None, gpt_like, path=str(tmp_path / "book.txt"))
    assert texts(data, gpt_like) == ["First line of a paragraph\nand its second.<|end|>", "Another paragraph.<|end|>"]
    assert data.stats.supervised == data.stats.tokens - 2  # every token but the first of each document


@pytest.mark.parametrize(
    ("row", "task", "what"),
    [
        ({"prompt": "p", "completion": "c"}, "causal-lm", "prompts with answers"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "causal-lm", "conversations"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, "causal-lm", "rows that are tokenised already"),
        ({"source": "a", "target": "b"}, "seq2seq", "sources and targets"),
    ],
)
def test_only_plain_text_can_be_split(lm, gpt_like, row, task, what):
    message = message_of(lambda: lm([row], gpt_like, task=task, on_long="split"))
    assert message.startswith(f"dataset.on_long: only plain text can be split into several samples; {what} are cut")


def test_streaming_is_accepted_and_explained(lm, gpt_like, tmp_path):
    rows = [{"text": "abc"}] * 3
    plain = lm(rows, gpt_like)
    streamed = lm(rows, gpt_like, streaming=True)
    assert streamed.from_cache  # the very same store
    assert streamed.notes[-1].startswith("streaming: the rows are read and tokenised in pieces, once, into memory-mapp")
    assert streamed.stats == plain.stats
    meta = json.loads((streamed.store.folder / "meta.json").read_text())
    assert meta["key"] == plain.store.key
