"""What is learned of conversations that real models' chat templates write. TRL ships those templates as they are."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from automodel.data.chat import BadChat, ChatTemplate

pytest.importorskip("trl")

SPECIAL = re.compile(r"<\|\w+\|?>|<\w+\|>|<｜[^｜]+｜>|<end_of_\w+>")
ENDS = {"llama": "<|eot_id|>", "gptoss": "<|return|>", "deepseek": "<｜end▁of▁sentence｜>", "qwen": "<|im_end|>"}
TOOLS = [{"type": "function", "function": {"name": "now", "description": "", "parameters": {"properties": {}}}}]


@pytest.fixture
def tokenizer_of(chat_like):
    """A tokenizer with the chat template of a model, and the special tokens in it."""

    def made(name: str):
        import trl

        tokenizer = copy.deepcopy(chat_like)
        text = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
        end = next((token for family, token in ENDS.items() if name.startswith(family)), "<|im_end|>")
        tokenizer.add_special_tokens(
            {"eos_token": end, "additional_special_tokens": sorted({*SPECIAL.findall(text), end})}
        )
        tokenizer.chat_template = text
        return tokenizer

    return made


@pytest.fixture
def learned(tokenizer_of):
    """The assistant's words in what a template makes of messages."""

    def found(name: str, messages: list[dict]) -> list[str]:
        chat = ChatTemplate(tokenizer_of(name))
        whole, spans = chat.spans(chat.turns(messages), TOOLS if chat.takes_tools else None)
        return [whole[start:end] for start, end in spans]

    return found


def said(*words: str, first: str = "user", **keys) -> list[dict]:
    other = {"user": "assistant", "assistant": "user"}
    roles = [first if number % 2 == 0 else other[first] for number in range(len(words))]
    return [{"role": role, "content": w, **(keys if role == "assistant" else {})} for role, w in zip(roles, words)]


CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"tz": "CET"}}}
LOOKED_UP = [
    {"role": "user", "content": "time?"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "noon", "name": "now", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is noon."},
]
CHANNEL = "<|channel|>final<|message|>"
THOUGHT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "reasoning_content": "so", "content": "Two"}]
GPT_OSS_CALL = ' to=functions.now<|channel|>commentary json<|message|>{"tz": "CET"}<|call|>'


@pytest.mark.parametrize(("name", "messages", "answers"), [
    # The prompt ends in an empty place for reasoning, which the answer fills: it was not learned.
    ("qwen3_5_nothink", THOUGHT, ["so\n</think>\n\nTwo<|im_end|>"]),
    ("qwen3_5_nothink", said("1+1?", "<think>so</think>Two"), ["so\n</think>\n\nTwo<|im_end|>"]),
    ("qwen3_5_think", THOUGHT, ["so\n</think>\n\nTwo<|im_end|>"]),
    ("qwen3", THOUGHT, ["<think>\nso\n</think>\n\nTwo<|im_end|>"]),
    # A greeting alone is refused, the conversation that it begins is not.
    ("qwen3_5_nothink", said("Hello!", "Hi", "Yo", first="assistant"), ["Hello!<|im_end|>", "Yo<|im_end|>"]),
    # What was said beside the call is dropped once the answer follows; the answer begins with its channel.
    ("gptoss", LOOKED_UP, [GPT_OSS_CALL, f"{CHANNEL}It is noon.<|return|>"]),
    ("gptoss", said("Hello!", "Hi", "Yo", first="assistant"), [f"{CHANNEL}Hello!", f"{CHANNEL}Yo<|return|>"]),
    # An empty list of calls is no call.
    ("llama3_1", said("Hi", "Yo", tool_calls=[]), ["Yo<|eot_id|>"]),
    ("deepseekv3", said("Hi", "Yo", tool_calls="[]"), ["Yo<｜end▁of▁sentence｜>"]),
    ("gptoss", said("Hi", "Yo", tool_calls=[]), [f"{CHANNEL}Yo<|return|>"]),
])  # fmt: skip
def test_the_assistants_words_alone_are_learned(learned, name, messages, answers):
    assert learned(name, messages) == answers


@pytest.mark.parametrize(("name", "messages", "why"), [
    ("gemma4_v5", LOOKED_UP, "the chat template writes message 2 into the middle of message 1"),
    ("smolvlm", said("How are you?", "Very well."), "the chat template leaves message 0 out"),
], ids=["a result inside an answer", "a template that wants lists of parts"])  # fmt: skip
def test_words_that_would_be_learned_or_lost_by_mistake_are_a_bad_row(learned, name, messages, why):
    with pytest.raises(BadChat, match=why):
        learned(name, messages)


REASONED = [{"messages": said("1+1?", "<think>hm</think>Two")}, {"messages": THOUGHT}, {"messages": said("Hi", "Yo")}]


@pytest.mark.parametrize(("name", "rows", "unsaid"), [
    ("deepseek_r1_distill", REASONED, 2),  # cuts off what was thought, and knows no key for it
    ("llama3_1", REASONED, 1),
    ("qwen3", REASONED, 0),
    ("qwen3", [{"messages": said("1?", "<think>a</think>One", "2?", "<think>b</think>Two")}], 0),
    ("llama3_1", [{"messages": LOOKED_UP}], 1),  # writes the call and nothing else
    ("qwen2_5", [{"messages": LOOKED_UP}], 0),
    ("deepseek_r1_distill", [{"prompt": "1+1?", "completion": "<think>hm</think>Two"}], 1),
])  # fmt: skip
def test_a_note_says_where_some_of_the_assistants_words_are_left_out(tokenizer_of, prepare_rows, name, rows, unsaid):
    data = prepare_rows(rows, tokenizer_of(name), "causal-lm", positions=4096, types=0)
    notes = [note for note in data.notes if "leaves out some of the assistant's words" in note]
    assert data.stats.unsaid == unsaid
    assert [f"in {unsaid} of {len(rows)} rows" in note for note in notes] == [True] * bool(unsaid)


@pytest.mark.parametrize(("name", "wrapped"), [("gemma4_v5", True), ("gptoss", True), ("qwen2_5", False)])
def test_tools_without_openais_wrapper_get_it_where_the_template_asks_for_it(tokenizer_of, prepare_rows, name, wrapped):
    bare = TOOLS[0]["function"]
    assert ChatTemplate(tokenizer_of(name)).tools([bare]) == (TOOLS if wrapped else [bare])
    rows = [{"messages": said("Hi", "Yo"), "tools": tools} for tools in ([bare], TOOLS, [], None)]
    assert prepare_rows(rows, tokenizer_of(name), "causal-lm", positions=4096, types=0).stats.used == 4
