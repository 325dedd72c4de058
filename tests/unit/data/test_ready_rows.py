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
