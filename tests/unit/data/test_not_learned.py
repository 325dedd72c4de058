"""Columns beside the answers that learning them as they are would not hear: preferences, and earlier turns."""

from __future__ import annotations

import pytest

from automodel.config.errors import UserError

ASKED, ANSWERED = {"role": "user", "content": "why ?"}, {"role": "assistant", "content": "so ."}
CHAT = {"messages": [ASKED, ANSWERED]}
ALPACA = {"instruction": "say why", "input": "", "output": "so ."}


def refused(prepare_rows, tokenizer, rows, **settings) -> str:
    with pytest.raises(UserError) as caught:
        prepare_rows(rows, tokenizer, "causal-lm", **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("good", "named"),
    [
        ({**CHAT, "label": True}, "dataset.messages_column: messages."),
        (
            {"prompt": "why ?", "completion": "so .", "label": True},
            "column_mapping: {prompt: prompt, answer: completion}.",
        ),
        ({**ALPACA, "kto_tag": True}, "{instruction: instruction, input: input, answer: output}."),
    ],
    ids=["chats", "prompts", "alpaca"],
)
def test_answers_marked_as_unwanted_are_not_learned(prepare_rows, chat_like, good, named):
    mark = list(good)[-1]
    message = refused(prepare_rows, chat_like, [good, {**good, mark: False}])
    assert message.startswith(f"dataset: the column '{mark}' says which answers are wanted (that of row 1 is not)")
    assert f"Keep the rows whose '{mark}' is true" in message
    assert message.endswith(named)
    assert prepare_rows([good, good], chat_like, "causal-lm").stats.used == 2, "those that are wanted alone"


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "why ?"}, {"from": "gpt", "value": "so ."}]},
        {"prompt": "why ?"},
        {"prompt": "why ?", "response": "so ."},
    ],
    ids=["chats", "only pairs", "prompts"],
)
def test_answers_to_compare_are_not_passed_over(prepare_rows, chat_like, row):
    message = refused(prepare_rows, chat_like, [{**row, "chosen": "so .", "rejected": "no ."}])
    assert message.startswith("dataset: the columns 'chosen' and 'rejected' are answers to compare")
    assert "dataset.column_mapping: {prompt: <column>, answer: chosen}" in message
    if "conversations" in row:
        assert message.endswith("name what is to be learned without them, dataset.messages_column: conversations.")


def test_whoever_names_the_columns_has_decided(prepare_rows, chat_like):
    bad = {**CHAT, "label": False, "chosen": "so .", "rejected": "no ."}
    assert prepare_rows([bad], chat_like, "causal-lm", messages_column="messages").stats.used == 1
    pair = {"prompt": "why ?", "chosen": "so .", "rejected": "no ."}
    mapping = {"prompt": "prompt", "answer": "chosen"}
    assert prepare_rows([pair], chat_like, "causal-lm", column_mapping=mapping).stats.used == 1


def test_earlier_turns_are_not_left_out_unsaid(prepare_rows, chat_like):
    rows = [{**ALPACA, "history": []}, {**ALPACA, "history": [["who ?", "me ."]]}]
    message = refused(prepare_rows, chat_like, rows)
    assert message.startswith("dataset: the column 'history' holds earlier turns (row 1 has some)")
    mapping = "{instruction: instruction, input: input, answer: output}"
    assert message.endswith(f"to learn without the earlier turns, name the columns: dataset.column_mapping: {mapping}.")
    assert prepare_rows(rows[:1], chat_like, "causal-lm").stats.used == 1, "none has any"
    named = {"instruction": "instruction", "input": "input", "output": "output"}
    assert prepare_rows(rows, chat_like, "causal-lm", column_mapping=named).stats.used == 2


def test_a_mapped_column_without_a_place_is_noted_and_not_kept(prepare_rows, gpt_like):
    mapping = {"question": "q", "context": "ctx", "answer": "a"}
    row = {"q": "what ?", "ctx": "", "a": "so ."}
    data = prepare_rows([row], gpt_like, "causal-lm", column_mapping=mapping, prompt_template="Q: {question} A:")
    assert data.layout["prompt"] == {"question": "q"}
    assert "ctx" not in data.description
    note = "dataset.column_mapping: not used, since prompt_template has no place for it: {context} ('ctx')"
    assert note in data.notes


def test_a_template_needs_no_more_than_the_answers_column(prepare_rows, gpt_like):
    """As the error advises where no answer is found."""
    row = {"q": "what ?", "a": "so ."}
    data = prepare_rows([row], gpt_like, "causal-lm", column_mapping={"answer": "a"}, prompt_template="Q: {q} A:")
    assert data.layout["prompt"] == {"q": "q"}
