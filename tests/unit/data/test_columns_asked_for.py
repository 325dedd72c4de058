"""Columns of a language model's data that cannot be told: the message says in which ways they can be named."""

from __future__ import annotations

import pytest

from automodel.config.errors import UserError

ROW = {"ctx": "the film is good", "q": "what is good ?", "a": "the film"}


def test_unknown_names_and_every_way_to_name_them(prepare_rows, gpt_like):
    with pytest.raises(UserError) as caught:
        prepare_rows([ROW], gpt_like, "causal-lm")
    message = str(caught.value)
    assert "It has: ctx (text), q (text), a (text)." in message
    for way in ("dataset.text_column: <column>", "messages_column: <column>", "{question: <column>, answer: <column>}"):
        assert way in message


@pytest.mark.parametrize(("roles", "hint"), [
    ({"question": "q", "anser": "a"}, " Did you mean 'answer'?"),
    ({"qestion": "q", "anser": "a"}, " Did you mean 'answer'?"),
    ({"context": "ctx", "question": "q"}, "got context, question."),
    ({"question": "q", "answer": "a", "output": "ctx"}, "got question, answer, output."),
], ids=["misspelt", "both misspelt", "no answer", "two answers"])  # fmt: skip
def test_a_mapping_names_one_answer(prepare_rows, gpt_like, roles, hint):
    with pytest.raises(UserError) as caught:
        prepare_rows([ROW], gpt_like, "causal-lm", column_mapping=roles)
    assert str(caught.value).startswith("dataset.column_mapping must name one column to learn")
    assert str(caught.value).endswith(hint)
