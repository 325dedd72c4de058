"""Tool calls: whatever spelling and file they come in, a model learns the same words; what its template cannot write is
named by its row."""

from __future__ import annotations

import copy
import json

import pytest

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.data.messages import normalised
from automodel.data.tool_calls import BadChat, parsed_tools

# Qwen's and Llama's way: arguments are a record, written with `tojson`.
RECORDS = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ '[' + c.function.name + ' ' + (c.function.arguments | tojson) + ']' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = RECORDS.replace("(c.function.arguments | tojson)", "c.function.arguments")  # DeepSeek's way: they are text

TOOLS = [
    [{"name": "weather", "parameters": {"city": {"type": "string"}}}],
    [{"name": "add", "parameters": {"a": {"type": "number"}}}],
]
LEARNED = ['[weather {"city": "Rome"}]<|im_end|>42<|im_end|>', '[add {"a": 1, "b": 2}]<|im_end|>42<|im_end|>']


def conversation(name: str, arguments, tools) -> dict:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "42"},
    ]
    return {"messages": turns, "tools": tools}


def rows(as_text: bool = False) -> list[dict]:
    calls = [("weather", {"city": "Rome"}), ("add", {"a": 1, "b": 2})]
    write = json.dumps if as_text else lambda value: value
    return [conversation(name, write(given), write(TOOLS[i])) for i, (name, given) in enumerate(calls)]


@pytest.fixture
def template(chat_like):
    def made(text: str):
        tokenizer = copy.deepcopy(chat_like)
        tokenizer.chat_template = text
        return tokenizer

    return made


def learned(data, tokenizer, index: int) -> str:
    store = data.store
    labels = store.token_labels[store.offsets[index] : store.offsets[index + 1]]
    return tokenizer.decode([label for label in labels.tolist() if label != IGNORE])


def whole(data, tokenizer, index: int) -> str:
    return tokenizer.decode(data.store.input_ids[data.store.offsets[index] : data.store.offsets[index + 1]])


def written(kind: str, folder, records: list[dict]) -> str:
    """The rows in a file whose columns have one type: every record then has the keys of all."""
    import pyarrow as pa
    import pyarrow.parquet as parquet
    from datasets import Dataset

    table, path = pa.Table.from_pylist(records), folder / f"data.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        Dataset(table).save_to_disk(path)
    return str(path)


@pytest.mark.parametrize("way", [RECORDS, TEXTS], ids=["records", "texts"])
@pytest.mark.parametrize("as_text", [False, True], ids=["given as records", "given as JSON"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "saved"])
def test_the_same_is_learned_from_every_spelling_and_file(prepare_rows, template, tmp_path, kind, as_text, way):
    tokenizer = template(way)
    if kind == "jsonl":
        data = prepare_rows(rows(as_text), tokenizer, "causal-lm")
    else:
        data = prepare_rows(None, tokenizer, "causal-lm", path=written(kind, tmp_path, rows(as_text)))
    assert [learned(data, tokenizer, i) for i in range(2)] == LEARNED
    assert [json.loads(whole(data, tokenizer, i).split("\n")[1][: -len("<|im_end|>")]) for i in range(2)] == TOOLS
    assert "null" not in whole(data, tokenizer, 0)


def test_function_calls_of_sharegpt_are_calls_where_the_template_has_a_form_for_them(prepare_rows, template, chat_like):
    turns = [
        {"from": "human", "value": "go"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "42"},
        {"from": "function_call", "value": "not JSON"},
    ]
    said = ["weather", "not JSON"]
    for tokenizer, name in ((template(RECORDS), "a.jsonl"), (chat_like, "b.jsonl")):
        data = prepare_rows([{"conversations": turns}], tokenizer, "causal-lm", name=name)
        parts = learned(data, tokenizer, 0).split("<|im_end|>")
        assert all(word in part for word, part in zip(said, parts))
        form = '[weather {"city": "Rome"}]' if tokenizer is not chat_like else turns[1]["value"]
        assert parts[0] == form


def test_calls_that_the_template_does_not_write_are_bad_rows(prepare_rows, chat_like, gpt_like):
    plain = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}], "tools": None}
    for tokenizer, name, template in ((chat_like, "a.jsonl", None), (gpt_like, "b.jsonl", "plain")):
        with pytest.raises(UserError) as caught:
            prepare_rows([plain, *rows()], tokenizer, "causal-lm", name=name, chat_template=template)
        message = str(caught.value)
        assert "2 of 3 rows cannot be used" in message
        assert "row 1: message 2 calls 'weather', but the chat template has no place for tool calls" in message


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (
            [{"function": {"name": "f", "arguments": "{oops"}}],
            "arguments of the call of 'f' in message 1 are not valid",
        ),
        ("[oops", "the tool calls of message 1 are not valid JSON"),
        ({"name": "f"}, "the tool calls of message 1 are not a list of records"),
    ],
)
def test_calls_that_cannot_be_read(calls, message):
    with pytest.raises(BadChat, match=message):
        normalised([{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": calls}])


def test_calls_without_arguments_and_without_a_wrapper():
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": ""}}]},
        {"role": "assistant", "content": None, "tool_calls": '[{"name": "now", "arguments": "{}"}]'},
    ]
    assert [turn["tool_calls"] for turn in normalised(turns)] == [
        [{"function": {"name": "now", "arguments": {}}}],
        [{"name": "now", "arguments": {}}],
    ]


def test_what_json_says_is_null_is_kept():
    assert parsed_tools('[{"name": "f", "default": null}]') == [{"name": "f", "default": None}]
    assert parsed_tools([{"name": "f", "default": None}]) == [{"name": "f"}]
    assert parsed_tools("") is None
    assert parsed_tools("[]") is None
    with pytest.raises(BadChat, match="the tools are not valid JSON"):
        parsed_tools("{")


def test_content_in_parts_is_joined_and_pictures_are_refused():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image": None}]
    assert normalised([{"role": "user", "content": parts}])[0]["content"] == "a b"
    with pytest.raises(BadChat, match=r"message 0 has parts that are not text \(image\)"):
        normalised([{"role": "user", "content": [*parts, {"type": "image", "image": "x.png"}]}])


PRINTED = RECORDS.replace("' ' + (c.function.arguments | tojson) + ']'", "' ' ~ c.function.arguments ~ ']'")


@pytest.mark.parametrize("given", ['{"city":"Rome", "warm": true}', {"city": "Rome", "warm": True}])
def test_arguments_that_a_template_prints_are_json(prepare_rows, template, given):
    """Text stays the text it is, as in stock transformers; a record becomes JSON, and not what Python prints of it."""
    tokenizer = template(PRINTED)
    row = {"messages": conversation("weather", given, None)["messages"]}
    said = given if isinstance(given, str) else '{"city": "Rome", "warm": true}'
    assert learned(prepare_rows([row], tokenizer, "causal-lm"), tokenizer, 0).startswith(f"[weather {said}]")
    if isinstance(given, str):
        said_by_stock = [{**message, "content": message["content"] or ""} for message in row["messages"]]
        assert f"[weather {said}]" in tokenizer.apply_chat_template(said_by_stock, tokenize=False)


def test_words_about_python_in_a_message_change_no_call(prepare_rows, template):
    tokenizer = template(RECORDS)
    messages = conversation("weather", '{"city": "Rome"}', None)["messages"]
    messages[1]["content"] = "call weather({'city': 'Rome'})"
    data = prepare_rows([{"messages": messages}], tokenizer, "causal-lm")
    assert learned(data, tokenizer, 0).startswith('[weather {"city": "Rome"}]')
