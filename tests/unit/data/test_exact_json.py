"""Values of JSON files reach a model as they are written, whatever Arrow would make of them."""

from __future__ import annotations

import copy
import json

import datasets
import pytest

from automodel.data.batch import IGNORE
from automodel.data.exact_json import with_all_digits
from automodel.data.json_faults import repeated_keys

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


def test_answers_that_are_numbers_keep_all_their_digits(learned, tmp_path):
    numbers = [12345678901234567890, 9007199254740993, 0.00001, 1.5, 72.0, -3, 2.5e-7, 1e22]
    rows = [{"prompt": "how many?", "completion": number} for number in numbers]
    written = ["12345678901234567890", "9007199254740993", "0.00001", "1.5", "72", "-3", "0.00000025", "1e+22"]
    assert learned(rows) == [f"{number}<|im_end|>" for number in written]
    assert learned(rows[:1], name="one.jsonl") == ["12345678901234567890<|im_end|>"]
    large = {"prompt": "how many?", "completion": 10**30 + 1}
    assert learned([*rows[2:4], large], name="large.jsonl")[-1] == f"{10**30 + 1}<|im_end|>"
    (tmp_path / "nested.json").write_text(json.dumps({"data": [rows[3], large]}))
    assert learned(None, path=str(tmp_path / "nested.json"))[-1] == f"{10**30 + 1}<|im_end|>"


def test_numbers_of_32_bits_are_written_with_their_own_digits(learned, tmp_path):
    features = datasets.Features({"prompt": datasets.Value("string"), "completion": datasets.Value("float32")})
    numbers = [0.1, 3.14159, 0.5, 16777217.0]
    rows = datasets.Dataset.from_dict({"prompt": ["?"] * 4, "completion": numbers}, features=features)
    rows.to_parquet(tmp_path / "rows.parquet")
    found = learned(None, path=str(tmp_path / "rows.parquet"))
    assert found == [f"{number}<|im_end|>" for number in ("0.1", "3.14159", "0.5", "16777216")]


def test_a_library_that_cannot_keep_json_reads_as_arrow_does(learned, monkeypatch):
    monkeypatch.delattr("datasets.Json")
    assert learned([called({"x": 1}), called({"x": 1.5})])[1] == 'f{"x": 1.5}<|im_end|>'


def test_files_that_python_reads_otherwise_stay_as_arrow_reads_them():
    rows = datasets.Dataset.from_dict({"n": [1e20, 0.5]})
    for records in ([], [{"n": 10**20}], [{"n": 10**20}, {"n": 0.5}, {"n": 1}]):
        assert with_all_digits(rows, lambda found=records: found)["n"][:] == [1e20, 0.5]
    exact = with_all_digits(rows, lambda: [{"n": 10**20}, {"n": None}])
    assert exact["n"][:] == [str(10**20), None]


def test_an_array_that_python_cannot_read_has_no_keys_twice(tmp_path):
    (tmp_path / "a.json").write_text('[{"a": 1, "a": 2}')
    assert repeated_keys(tmp_path / "a.json") is None
    (tmp_path / "a.json").write_text('[{"a": 1, "a": 2}]')
    assert "row 0 has the key 'a' twice" in repeated_keys(tmp_path / "a.json")
