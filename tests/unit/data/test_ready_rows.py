"""Rows that somebody else tokenised: everything about them that a model could not take is named by its row."""

from __future__ import annotations

import pytest

from automodel.config.errors import UserError

GOOD = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [-100, 99999, 3]}, "row 1: label 99999 is outside the tokenizer's vocabulary of 260"),
        ({"labels": [-100, -1, 3]}, "row 1: label -1 is outside the tokenizer's vocabulary"),
        ({"labels": None}, "row 1: labels is missing"),
        ({"labels": [-100, None, 3]}, r"row 1: a label is missing \(null\)"),
        ({"labels": [-100, 2]}, "row 1: the row has 3 input_ids but 2 labels"),
        ({"attention_mask": [1, 1]}, "row 1: the row has 3 input_ids but 2 attention_mask"),
        ({"attention_mask": [1, 1, 1, 1]}, "row 1: the row has 3 input_ids but 4 attention_mask"),
        ({"input_ids": [1, None, 3]}, r"row 1: a token is missing \(null\)"),
        ({"input_ids": [1, 99999, 3]}, "row 1: token 99999 is outside"),
        ({"input_ids": []}, "row 1: input_ids is empty"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(prepare_rows, gpt_like, change, message):
    with pytest.raises(UserError, match=message):
        prepare_rows([GOOD, {**GOOD, **change}], gpt_like, "causal-lm")


def test_targets_of_a_seq2seq_model_are_tokens(prepare_rows, gpt_like):
    rows = [{"input_ids": [1, 2], "labels": [3, 4]}, {"input_ids": [1, 2], "labels": [3, 70000]}]
    with pytest.raises(UserError, match="row 1: label 70000 is outside the tokenizer's vocabulary"):
        prepare_rows(rows, gpt_like, "seq2seq")


def test_good_rows_are_taken_as_they_are(prepare_rows, gpt_like):
    padded = {"input_ids": [0, 4, 5], "labels": [-100, -100, 5], "attention_mask": [0, 1, 1]}
    store = prepare_rows([GOOD, padded], gpt_like, "causal-lm").store
    assert store.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert store.token_labels.tolist() == [-100, 2, 3, -100, 5]


def documents(store) -> list[tuple[list[int], list[int]]]:
    pieces = [slice(*ends) for ends in zip(store.offsets, store.offsets[1:])]
    return [(store.input_ids[piece].tolist(), store.token_labels[piece].tolist()) for piece in pieces]


@pytest.mark.parametrize("said", [
    {"seq_lengths": [3, 2]}, {"position_ids": [0, 1, 2, 0, 1]},
    {"seq_lengths": [3, 2], "position_ids": [0, 1, 2, 0, 1]},
])  # fmt: skip
def test_rows_that_somebody_packed_are_taken_apart(prepare_rows, gpt_like, said):
    """As one document, its parts saw each other, and the first token of the second one was learned from the first."""
    store = prepare_rows(
        [{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, 4, 5], **said}], gpt_like, "causal-lm"
    ).store
    assert documents(store) == [([1, 2, 3], [-100, 2, 3]), ([4, 5], [4, 5])]
    padded = {"input_ids": [1, 2, 3, 4, 5, 0], "attention_mask": [1, 1, 1, 1, 1, 0], **said}
    padded |= {"position_ids": [*said["position_ids"], 0]} if "position_ids" in said else {}
    store = prepare_rows([padded], gpt_like, "causal-lm", name="padded.jsonl").store
    assert documents(store) == [([1, 2, 3], [1, 2, 3]), ([4, 5], [4, 5])]


def test_masks_say_what_is_learned(prepare_rows, gpt_like):
    row = {"input_ids": [1, 2, 3, 4], "completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 1, 0]}
    assert documents(prepare_rows([row], gpt_like, "causal-lm").store) == [([1, 2, 3, 4], [-100, -100, 3, -100])]
    del row["completion_mask"]
    made = prepare_rows([row], gpt_like, "causal-lm", name="b.jsonl")
    assert documents(made.store) == [([1, 2, 3, 4], [-100, 2, 3, -100])]
    with pytest.raises(UserError, match="dataset: the column 'loss_mask' says which tokens are learned"):
        prepare_rows([{**GOOD, "loss_mask": [0, 1, 1]}], gpt_like, "causal-lm", name="c.jsonl")


@pytest.mark.parametrize(("row", "message"), [
    ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "row 0: each label is that of the next token already"),
    ({"input_ids": [1, 2, 3], "labels": [-100, 3, 7]}, None),  # one alone may be a coincidence
    ({"input_ids": [1, 1, 1], "labels": [1, 1, 1]}, None),
    ({"input_ids": [1, 2, 3], "seq_lengths": [2, 2]}, "row 0: the row has 3 input_ids, but its seq_lengths sum"),
    ({"input_ids": [1, 2, 3], "assistant_masks": [0, 1]}, "row 0: the row has 3 input_ids but 2 assistant_masks"),
    ({"input_ids": [1, 2, 3], "assistant_masks": [1, 0, 0]}, "row 0: no token of the row carries a label"),
])  # fmt: skip
def test_what_a_language_models_rows_say_is_checked(prepare_rows, gpt_like, row, message):
    if message is None:
        assert prepare_rows([row], gpt_like, "causal-lm").stats.used == 1
        return
    with pytest.raises(UserError, match=message):
        prepare_rows([row], gpt_like, "causal-lm")
