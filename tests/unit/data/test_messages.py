"""Messages in the forms that files have them in: what cannot be read is a bad row, and never learned as it stands."""

from __future__ import annotations

import csv
import json

import pytest

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.data.messages import normalised
from automodel.data.tool_calls import BadChat

TALK = [{"role": "user", "content": "a } {"}, {"role": "assistant", "content": "it's, \n so"}]
WITH_CALLS = (
    "{% if tools %}{{ (tools | tojson) + '\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}[{{ c.function.name }}]{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def learned_from_cell(tmp_path, prepare_rows, chat_like):
    def learned(cell: str) -> str:
        with open(tmp_path / "data.csv", "w", newline="") as file:
            csv.writer(file).writerows([["messages"], [cell]])
        store = prepare_rows(None, chat_like, "causal-lm", path=str(tmp_path / "data.csv")).store
        return chat_like.decode([label for label in store.token_labels.tolist() if label != IGNORE])

    return learned


@pytest.mark.parametrize("write", [json.dumps, str], ids=["JSON", "Python"])
def test_a_cell_with_a_list_is_a_conversation(learned_from_cell, write):
    assert learned_from_cell(write(TALK)) == "it's, \n so<|im_end|>"


def test_a_cell_with_a_list_that_nobody_can_read_is_no_plain_text(learned_from_cell):
    """What pandas writes of the arrays that Parquet and `datasets` give it."""
    with pytest.raises(UserError, match=r"row 0: the conversation is text and not a list of messages \(it is neither"):
        learned_from_cell("[" + "\n ".join(map(str, TALK)) + "]")


@pytest.mark.parametrize("given", ['{"a":null, "b": 1}', {"a": None, "b": 1}, "{}"])
def test_messages_that_were_read_are_read_as_they_are(given):
    """`evaluate --generate` asks with the turns that it took the last answer from: nulls were lost on the way."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": given}}]}
    once = normalised([{"role": "user", "content": "go"}, call])
    twice = normalised(once)
    assert twice == once
    first, second = (turns[1]["tool_calls"][0]["function"]["arguments"] for turns in (once, twice))
    assert (first, first.text) == (second, second.text)


def test_both_spellings_in_one_record():
    rows = [{"from": "gpt", "value": "b", "role": None, "content": None}]
    assert normalised(rows) == [{"role": "assistant", "content": "b"}]


def test_a_part_that_has_no_text_is_not_left_out():
    with pytest.raises(BadChat, match="message 0 has a part without 'text'"):
        normalised([{"role": "user", "content": [{"type": "text", "content": "hi"}]}])


def test_calls_and_functions_by_their_old_names(prepare_rows, chat_like):
    chat_like = type(chat_like)(tokenizer_object=chat_like.backend_tokenizer, eos_token="<|im_end|>")
    chat_like.chat_template = WITH_CALLS
    call = {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}}
    result = {"role": "function", "name": "now", "content": "noon"}
    row = {"messages": [TALK[0], call, result, TALK[1]], "functions": [{"name": "now", "parameters": {}}]}
    store = prepare_rows([row], chat_like, "causal-lm").store
    learned = chat_like.decode([label for label in store.token_labels.tolist() if label != IGNORE])
    assert learned == "[now]<|im_end|>it's, \n so<|im_end|>"
    assert chat_like.decode(store.input_ids).startswith('[{"name": "now"')


@pytest.mark.parametrize("other", [["Be", "kind."], {"content": "Be kind."}])
def test_a_system_prompt_that_is_no_text_is_not_left_out(prepare_rows, chat_like, other):
    """In a column of several kinds, as here, those that are text were left out as well, without a word."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"messages": turns, "system": "Be brief."}, {"messages": turns, "system": other}]
    with pytest.raises(UserError, match=f"1 of 2 rows .*\n.*row 1: the system prompt is {type(other).__name__}"):
        prepare_rows(rows, chat_like, task="causal-lm", types=0)


def test_a_column_of_numbers_is_no_system_prompt(prepare_rows, chat_like):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    data = prepare_rows([{"messages": turns, "system": 1}], chat_like, task="causal-lm", types=0)
    assert "system" not in chat_like.decode(data.store.input_ids)
