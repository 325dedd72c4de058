"""Values of JSON files reach a model as they are written, whatever Arrow would make of them."""

from __future__ import annotations

import copy

import pytest

from automodel.data.batch import IGNORE

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def learned(prepare_rows, chat_like):
    def answers(rows: list[dict], **settings) -> list[str]:
        tokenizer = copy.deepcopy(chat_like)
        tokenizer.chat_template = TEMPLATE
        store = prepare_rows(rows, tokenizer, "causal-lm", **settings).store
        pieces = [store.token_labels[start:end].tolist() for start, end in zip(store.offsets, store.offsets[1:])]
        return [tokenizer.decode([label for label in piece if label != IGNORE]) for piece in pieces]

    return answers


def called(arguments: dict) -> dict:
    """A conversation all of whose messages have the same keys, as programs write them."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = {"role": "user", "content": "go", "tool_calls": None}
    return {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": [call]}]}


def test_whole_numbers_stay_whole_where_another_row_has_a_decimal(learned):
    assert learned([called({"x": 1}), called({"x": 1.5})]) == ['f{"x": 1}<|im_end|>', 'f{"x": 1.5}<|im_end|>']


def test_texts_that_look_like_dates_are_texts(learned):
    dates = ["2024-01-01", "2024-01-02T10:00:00", "2024-01-03 10:00:00"]
    assert learned([{"prompt": "when?", "completion": date} for date in dates]) == [f"{d}<|im_end|>" for d in dates]
    turns = [[{"role": "user", "content": dates[0]}, {"role": "assistant", "content": date}] for date in dates]
    assert learned([{"messages": t} for t in turns], name="chats.jsonl") == [f"{date}<|im_end|>" for date in dates]
    assert learned([{"text": dates[0]}], name="texts.jsonl") == [f"{dates[0]}<|im_end|>"]


def test_numbers_beyond_64_bits_are_still_read(learned):
    assert learned([called({"x": 10**20}), called({"x": 1.5})])[1] == 'f{"x": 1.5}<|im_end|>'


def test_a_library_that_cannot_keep_json_reads_as_arrow_does(learned, monkeypatch):
    monkeypatch.delattr("datasets.Json")
    assert learned([called({"x": 1}), called({"x": 1.5})])[1] == 'f{"x": 1.5}<|im_end|>'
