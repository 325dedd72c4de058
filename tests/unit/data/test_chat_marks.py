"""Whose words are learned: answers that a template marks itself (`{% generation %}`), templates of several houses, and
conversations that cannot be read."""

from __future__ import annotations

import copy
import json

import pytest
from tokenizers import AddedToken

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.data.chat import BadChat, ChatTemplate
from automodel.data.messages import normalised
from automodel.tasks.registry import CAUSAL_LM

TURN = "{{ '<|im_start|>' + m.role + '\n' }}"
ASKED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
MARKED = (
    "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' %}<think></think>\n"
    "{%- generation -%}{{ m.content }}" + CALLS + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}" + ASKED
)
# The assistant is called otherwise, and there is no place for a system prompt.
MODEL = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% for m in messages %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
# Nothing but brackets says whose turn it is, and the system prompt is part of the first question.
BRACKETS = (
    "{{ bos_token }}{% set first = messages[0].content + '\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}[INST] {{ first if loop.first else '' }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# The last turn is ended twice (Phi-3).
TWICE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|im_end|>{% endif %}"
)
# Reasoning is written in the last turn only, and there even where it is empty (Qwen3).
THINKING = (
    "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' and loop.last %}<think>"
    "{{ m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' }}</think>"
    "{% endif %}{{ m.content.split('</think>')[-1] }}" + CALLS + "{{ '<|im_end|>\n' }}{% endfor %}" + ASKED
)
# Tools are told of in the last question, and a tool's result wants the call before it (Mistral).
LAST_QUESTION = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[TOOLS]' if tools and m == asked[-1] else '' }}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "[RESULT]{{ m.content }}"
    "{% elif m.tool_calls %}[CALL]{{ m.tool_calls[0].function.name }}{{ eos_token }}"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "Two"},
]
SYSTEM = {"role": "system", "content": "Be good."}


def with_template(tokenizer, text: str):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = text
    return tokenizer


def learned(tokenizer, messages: list[dict]) -> list[str]:
    whole, spans = ChatTemplate(tokenizer).spans(messages)
    return [whole[start:end] for start, end in spans]


def test_the_templates_own_marks_are_taken(chat_like):
    tokenizer = with_template(chat_like, MARKED)
    assert learned(tokenizer, [SYSTEM, *TALK]) == ["Yo<|im_end|>", "Two<|im_end|>"]  # without the <think></think>
    made = tokenizer.apply_chat_template([SYSTEM, *TALK], return_dict=True, return_assistant_tokens_mask=True)
    kept = [token for token, mark in zip(made["input_ids"], made["assistant_masks"]) if mark]
    assert tokenizer.decode(kept) == "".join(learned(tokenizer, [SYSTEM, *TALK]))
    assert learned(tokenizer, [TALK[0], CALL]) == ["[now]<|im_end|>"]
    nothing = with_template(chat_like, MARKED.replace("{% if m.role == 'assistant' %}", "{% if m.role == 'poet' %}"))
    with pytest.raises(BadChat, match="marks nothing of the conversation as the assistant's"):
        learned(nothing, TALK)


@pytest.mark.parametrize(("text", "answers"), [
    (MODEL, ["Yo<|im_end|>", "Two<|im_end|>"]),
    (BRACKETS, [" Yo<|im_end|>", " Two<|im_end|>"]),
    (TWICE, ["Yo<|end|>", "Two<|end|>\n<|im_end|>"]),
    (THINKING, ["Yo<|im_end|>", "<think></think>Two<|im_end|>"]),
], ids=["model", "brackets", "ended twice", "thinking"])  # fmt: skip
def test_answers_are_found_where_nothing_is_marked(chat_like, text, answers):
    assert learned(with_template(chat_like, text), TALK) == answers


@pytest.mark.parametrize("strict", [False, True], ids=["any turn", "a result wants its call"])
def test_turns_that_are_written_otherwise_once_others_follow(chat_like, strict):
    """Reasoning that is dropped from earlier turns; and calls, whose turns have no words to look for."""
    wants = (
        "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no') }}{% endif %}"
    )
    tokenizer = with_template(
        chat_like, THINKING.replace("{% for m in messages %}", "{% for m in messages %}" + wants * strict)
    )
    thought = {"role": "assistant", "content": "<think>hm</think>Yo"}
    result = {"role": "tool", "content": "noon"}
    talk = [TALK[0], thought, TALK[2], CALL, result, {"role": "assistant", "content": "<think>so</think>Noon."}]
    assert learned(tokenizer, talk) == ["Yo<|im_end|>", "[now]<|im_end|>", "<think>so</think>Noon.<|im_end|>"]
    unwritten = with_template(chat_like, THINKING.replace(CALLS, ""))
    with pytest.raises(BadChat, match="message 3 calls 'now'|message 3 cannot be found"):
        learned(unwritten, talk)


def test_calls_behind_questions_that_are_written_otherwise_once_others_follow(chat_like):
    chat = ChatTemplate(with_template(chat_like, LAST_QUESTION))
    result = {"role": "tool", "content": "noon"}
    whole, spans = chat.spans([TALK[0], CALL, result, TALK[1], TALK[2], CALL, result, TALK[3]], [{"name": "now"}])
    answers = ["[CALL]now<|im_end|>", " Yo<|im_end|>", "[CALL]now<|im_end|>", " Two<|im_end|>"]
    assert [whole[start:end] for start, end in spans] == answers
    assert [start for start, _ in spans] == sorted({start for start, _ in spans})  # two calls, each in its own place


def test_no_message_is_left_out_by_a_template(chat_like):
    """Templates pass over roles that they do not know, without a word."""
    known = "{% for m in messages if m.role in ('user', 'assistant', 'system') %}"
    template = TWICE.replace("{% for m in messages %}", known)
    tokenizer = with_template(chat_like, template)
    chat, said = ChatTemplate(tokenizer), {"role": "developer", "content": "Be brief."}
    assert chat.turns([said, *TALK])[0] == {"role": "system", "content": "Be brief."}
    assert "Be brief." in chat.spans(chat.turns([said, *TALK]))[0]
    own = ChatTemplate(with_template(chat_like, template.replace("'system'", "'developer'")))
    assert own.turns([said, *TALK])[0]["role"] == "developer"
    with pytest.raises(BadChat, match="the chat template leaves message 0 out \\(its role is 'system'\\)"):
        own.spans([SYSTEM, *TALK])
    with pytest.raises(BadChat, match="the chat template leaves message 1 out \\(its role is 'assitant'\\)"):
        chat.spans(chat.turns([TALK[0], {"role": "assitant", "content": "Yo"}, *TALK[2:]]))


def test_system_prompts_are_read_or_refused_by_the_template(chat_like):
    assert learned(with_template(chat_like, BRACKETS), [SYSTEM, *TALK]) == [" Yo<|im_end|>", " Two<|im_end|>"]
    with pytest.raises(BadChat, match="the chat template refuses the messages: no system role"):
        learned(with_template(chat_like, MODEL), [SYSTEM, *TALK])


@pytest.mark.parametrize(("messages", "why"), [
    (["hi", "yo"], "message 0 is 'hi' and not a record with 'role' and 'content'"),
    ([None], "message 0 is 'None' and not a record"),
    ({"role": "user"}, "the conversation is a dict and not a list of messages"),
    ("hi", "the conversation is text and not a list of messages"),
    ([{"role": "user", "content": 5}], "the content of message 0 is 5 and not text"),
    ([{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}], r"\(a role is spelt 'asistant'\)"),
    ([{"role": 3, "content": "a"}], "the role of message 0 is 3 and not text"),
], ids=["texts", "none", "record", "text", "number", "role", "role number"])  # fmt: skip
def test_conversations_that_cannot_be_read(chat_like, messages, why):
    with pytest.raises(BadChat, match=why):
        ChatTemplate(chat_like).spans(normalised(messages))


def test_a_missing_template_a_limit_and_every_kind_of_bad_row_are_one_error(prepare_rows, gpt_like):
    asked, good = {"role": "user", "content": "Hi"}, {"messages": TALK}
    rows = [
        good,
        {"messages": [asked]},
        {"messages": []},
        {"messages": [{"role": "user", "content": "q" * 600}, TALK[1]]},
        {"messages": [asked, {"role": "assistant", "content": ""}]},
        {"messages": [asked, {"role": "assistant", "content": None}]},
        {"messages": [asked, {"role": "asistant", "content": "Yo"}]},
    ]
    with pytest.raises(UserError) as caught:
        prepare_rows(rows, gpt_like, "causal-lm", max_length=4096, positions=256, types=0)
    message = str(caught.value)
    assert message.startswith("3 problems with the data\n- dataset.max_length is 4,096, but the model has only 256")
    assert "\n- dataset: the tokenizer has no chat template" in message
    assert "\n- dataset: 6 of 7 rows cannot be used" in message
    faults = [line.strip() for line in message.split("\n") if line.strip().startswith("row ")]
    kinds = ("has no assistant", "is empty", "nothing of the answer is left", "are empty", "has no content", "asistant")
    assert [line.split(":")[0] for line in faults] == [f"row {n}" for n in range(1, 7)]
    assert all(kind in line for kind, line in zip(kinds, faults))


def test_columns_of_one_dataset_and_rows_of_another_are_one_error(tmp_path, gpt_like):
    from automodel.data.config import DatasetConfig, MixtureEntry
    from automodel.data.prepare import prepare

    for name, row in (("a", {"prompt": "p", "completion": "c"}), ("b", {"prompt": "p", "completion": ""})):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 1001)
    entries = (
        MixtureEntry(path=str(tmp_path / "a.jsonl"), column_mapping={"prompt": "promt", "completion": "completion"}),
        MixtureEntry(path=str(tmp_path / "b.jsonl")),
    )
    cfg = DatasetConfig(mixture=entries, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError) as caught:
        prepare(cfg, row_format=CAUSAL_LM.rows, tokenizer=gpt_like, max_positions=256, type_vocab_size=0)
    message = str(caught.value)
    assert "- dataset.mixture.0.column_mapping: the data has no column 'promt'" in message
    assert "- dataset.mixture.1: 1,000 of the first 1,000 rows cannot be used" in message


@pytest.mark.parametrize("text", [MARKED, MODEL, BRACKETS], ids=["marked", "model", "brackets"])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_answers_that_the_data_leave_out_are_read_and_not_learned(chat_like, text, mark):
    """OpenAI's `weight`, on any answer; other weights are none that can be kept."""
    tokenizer = with_template(chat_like, text)
    both = learned(tokenizer, TALK)
    whole = ChatTemplate(tokenizer).spans(TALK)[0]
    first, last = ([*TALK[:turn], {**TALK[turn], **mark}, *TALK[turn + 1 :]] for turn in (1, 3))
    assert learned(tokenizer, first) == both[1:]
    assert learned(tokenizer, last) == both[:1]
    assert ChatTemplate(tokenizer).spans(first)[0] == whole, "it is still there to be read"
    assert learned(tokenizer, [{**message, "weight": 1, "train": True} for message in TALK]) == both
    assert learned(tokenizer, [{**message, "weight": None} for message in TALK]) == both
    with pytest.raises(BadChat, match="every assistant message has weight 0 or train: false"):
        learned(tokenizer, [{**message, **mark} for message in TALK])
    for odd in ({"weight": 0.5}, {"weight": "0"}, {"train": "false"}):
        (key, value), *_ = odd.items()
        with pytest.raises(BadChat, match=f"message 1 has {key} {value!r}; 1"):
            learned(tokenizer, [TALK[0], {**TALK[1], **odd}])


@pytest.mark.parametrize("mark", [{"weight": 1}, {"train": True}])
def test_a_weight_says_nothing(chat_like, mark):
    """An answer that is empty, or not there, is none, whatever it weighs."""
    tokenizer = with_template(chat_like, MODEL)
    empty = {"role": "assistant", "content": "", **mark}
    with pytest.raises(BadChat, match="messages are empty"):
        learned(tokenizer, [TALK[0], empty])
    with pytest.raises(BadChat, match="messages are empty"):
        learned(tokenizer, [TALK[0], {**TALK[1], "weight": 0}, TALK[2], empty])
    with pytest.raises(BadChat, match="message 1 has no content"):
        normalised([TALK[0], {"role": "assistant", "content": None, **mark}])


def test_a_system_prompt_beside_the_messages_is_written_once(prepare_rows, chat_like):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    given = [{"role": "system", "content": "S"}, *turns]
    rows = [
        {"messages": turns, "system": "S"},
        {"messages": given, "system": " S "},
        {"messages": given, "system": None},
    ]
    store = prepare_rows(rows, chat_like, "causal-lm").store
    texts = [chat_like.decode(store.input_ids[a:b]) for a, b in zip(store.offsets[:-1], store.offsets[1:])]
    assert texts == ["<|im_start|>system\nS<|im_end|>\n" + texts[0].partition("<|im_end|>\n")[2]] * 3
    with pytest.raises(UserError, match="row 0: the conversation begins with a system message and another one"):
        prepare_rows([{"messages": given, "system": "other"}], chat_like, "causal-lm", name="b.jsonl")


def test_an_end_that_only_the_added_tokens_mark_as_special_ends_a_turn(prepare_rows, chat_like):
    """Gemma's `<end_of_turn>`: no end-of-sequence token is put behind it."""
    tokenizer = copy.deepcopy(chat_like)
    tokenizer.add_tokens([AddedToken("<turn>", special=True)], special_tokens=False)
    assert tokenizer.convert_tokens_to_ids("<turn>") not in tokenizer.all_special_ids
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<turn>")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    store = prepare_rows([{"messages": turns}], tokenizer, "causal-lm").store
    assert tokenizer.decode(store.input_ids) == tokenizer.apply_chat_template(turns, tokenize=False)
    learned = [label for label in store.token_labels.tolist() if label != IGNORE]
    assert tokenizer.decode(learned) == "ho<turn>"


def test_a_misspelt_role_is_no_answer_that_is_left_out(chat_like):
    """Templates that write any role would write it, and the answer would not be learned, without a word."""
    any_role = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    talk = [TALK[0], {"role": "asistant", "content": "Yo"}, TALK[0], TALK[1]]
    with pytest.raises(BadChat, match="message 1 has the role 'asistant'; did you mean 'assistant'?"):
        learned(with_template(chat_like, any_role), talk)
    own = [TALK[0], {"role": "critic", "content": "Hm"}, TALK[1]]
    assert learned(with_template(chat_like, any_role), own)
