"""Causal language modelling: exactly which characters are learned, for every layout."""

from __future__ import annotations

import copy
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.data.chat import PLAIN_TEMPLATE, ChatTemplate
from automodel.data.collate import PackedCollator


def text_of(data, tokenizer, index: int = 0) -> tuple[str, str]:
    """A sample as text: all of it, and what is learned."""
    store = data.store
    part = slice(store.offsets[index], store.offsets[index + 1])
    ids, labels = store.input_ids[part], store.token_labels[part]
    assert all(label in (IGNORE, token) for label, token in zip(labels, ids))
    return tokenizer.decode(ids), tokenizer.decode(ids[labels != IGNORE])


@pytest.fixture
def lm(prepare_rows):
    def prepared(rows, tokenizer, **settings):
        return prepare_rows(
            rows, tokenizer, task="causal-lm", types=0, positions=settings.pop("positions", 2048), **settings
        )

    return prepared


PLAIN = [
    (
        {"prompt": "2+2=", "completion": "4"}, {},
        "2+2=4<|end|>", "4<|end|>",
    ),
    (
        {"question": "Why?", "answer": "Because."}, {},
        "Question: Why?\n\nAnswer: Because.<|end|>", " Because.<|end|>",
    ),
    (
        {"context": "Sky is blue.", "question": "Color?", "answers": {"text": ["blue", "red"], "answer_start": [7, 0]}},
        {},
        "Context: Sky is blue.\n\nQuestion: Color?\n\nAnswer: blue<|end|>", " blue<|end|>",
    ),
    (
        {"instruction": "Add.", "input": "1 2", "output": "3"}, {},
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3<|end|>", "3<|end|>",
    ),
    (
        {"instruction": "Say hi.", "input": "", "output": "hi"}, {},
        "### Instruction:\nSay hi.\n\n### Response:\nhi<|end|>", "hi<|end|>",
    ),
    (
        {"system": "Be brief.", "instruction": "Say hi.", "input": "", "output": "hi"}, {},
        "Be brief.\n\n### Instruction:\nSay hi.\n\n### Response:\nhi<|end|>", "hi<|end|>",
    ),
    (
        {"i": "Add.", "n": "1 2", "c": "C", "t": "T", "a": "3"},
        {"column_mapping": {"instruction": "i", "input": "n", "context": "c", "topic": "t", "answer": "a"}},
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\nC\n\nTopic: T\n\n### Response:\n3<|end|>", "3<|end|>",
    ),
    (
        {"ctx": "C", "q": "Q", "a": "A"}, {"column_mapping": {"context": "ctx", "question": "q", "answer": "a"}},
        "Context: C\n\nQuestion: Q\n\nAnswer: A<|end|>", " A<|end|>",
    ),
    (
        {"q": "Q", "answer": "A"}, {"prompt_template": "Asked: {q}\n"},
        "Asked: Q\nA<|end|>", "A<|end|>",
    ),
    (
        {"question": "Q", "answer": "A"}, {"answer_only_loss": False},
        "Question: Q\n\nAnswer: A<|end|>", "Question: Q\n\nAnswer: A<|end|>",
    ),
    (
        {"question": "Größe?", "answer": "schön ☃"}, {},
        "Question: Größe?\n\nAnswer: schön ☃<|end|>", " schön ☃<|end|>",
    ),
    (
        {"text": "just text"}, {},
        "just text<|end|>", "just text<|end|>",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "settings", "whole", "learned"), PLAIN, ids=lambda v: str(v)[:30])
def test_layouts_without_a_chat_template(lm, gpt_like, row, settings, whole, learned):
    assert text_of(lm([row], gpt_like, **settings), gpt_like) == (whole, learned)


@pytest.mark.parametrize(("context", "kind"), [(["Sky"], "list"), ({"title": ["Sky"], "sentences": []}, "dict")])
def test_a_context_that_is_no_text_is_no_prompt(lm, gpt_like, context, kind):
    """It was written as Python prints it: `Context: ['Sky']`."""
    row = {"context": context, "question": "Color?", "answer": "blue"}
    with pytest.raises(UserError, match=f"row 0: the context is {kind} and not text"):
        lm([row], gpt_like)


def test_bytes_of_parquet_are_no_prompt(tmp_path, lm, gpt_like):
    path = tmp_path / "x.parquet"
    columns = {"context": pa.array([b"Sky is blue."]), "question": ["Color?"], "answer": ["blue"]}
    pq.write_table(pa.table(columns), path)
    with pytest.raises(UserError, match="row 0: the context is bytes and not text"):
        lm(None, gpt_like, path=str(path))


def test_a_context_may_be_a_number_or_missing(lm, gpt_like):
    rows = [{"context": 72.0, "question": "Half?", "answer": "36"}, {"context": None, "question": "Q?", "answer": "a"}]
    data = lm(rows, gpt_like)
    assert text_of(data, gpt_like, 0)[0] == "Context: 72\n\nQuestion: Half?\n\nAnswer: 36<|end|>"
    assert text_of(data, gpt_like, 1)[0] == "Question: Q?\n\nAnswer: a<|end|>"


def test_several_right_answers_may_be_numbers(lm, gpt_like):
    """As one number may: they were bad rows."""
    data = lm([{"question": "2+3?", "answers": [5.0, 6.5]}, {"question": "0.5+1?", "answers": [1.5]}], gpt_like)
    assert [text_of(data, gpt_like, i)[1] for i in range(2)] == [" 5<|end|>", " 1.5<|end|>"]


def test_no_column_of_an_instruction_is_lost_in_a_chat(lm, chat_like):
    mapping = {"instruction": "i", "input": "n", "context": "c", "topic": "t", "system": "s", "answer": "a"}
    row = {"s": "S", "i": "I", "n": "N", "c": "C", "t": "T", "a": "A"}
    turns = said(("system", "S"), ("user", "I\n\nN\n\nC\n\nTopic: T"), ("assistant", "A"))
    assert text_of(lm([row], chat_like, column_mapping=mapping), chat_like) == (turns, "A<|im_end|>")


def test_a_start_token_stays_in_front(lm, gpt_like_with_start):
    data = lm([{"prompt": "ab", "completion": "c"}], gpt_like_with_start)
    assert text_of(data, gpt_like_with_start) == ("<s>abc<|end|>", "c<|end|>")


def said(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "A2"},
]
SHAREGPT = [
    {"from": "human", "value": "hi"},
    {"from": "function_call", "value": "{}"},
    {"from": "observation", "value": "42"},
    {"from": "gpt", "value": "it is 42"},
]


@pytest.mark.parametrize(
    ("row", "turns", "learned"),
    [
        (
            {"context": "C", "question": "Q", "answer": "A"},
            [("user", "Context: C\n\nQuestion: Q"), ("assistant", "A")],
            "A<|im_end|>",
        ),
        (
            {"prompt": "P", "completion": "A", "system": "S"},
            [("system", "S"), ("user", "P"), ("assistant", "A")],
            "A<|im_end|>",
        ),
        (
            {"instruction": "I", "input": "X", "output": "A"},
            [("user", "I\n\nX"), ("assistant", "A")],
            "A<|im_end|>",
        ),
        (
            {"messages": MESSAGES},
            [("system", "S"), ("user", "hi"), ("assistant", "A1"), ("user", "more"), ("assistant", "A2")],
            "A1<|im_end|>A2<|im_end|>",
        ),
        (
            {"conversations": SHAREGPT, "system": "S"},
            [("system", "S"), ("user", "hi"), ("assistant", "{}"), ("tool", "42"), ("assistant", "it is 42")],
            "{}<|im_end|>it is 42<|im_end|>",
        ),
    ],
    ids=["squad", "prompt", "alpaca", "messages", "sharegpt"],
)
def test_layouts_with_a_chat_template(lm, chat_like, row, turns, learned):
    assert text_of(lm([row], chat_like), chat_like) == (said(*turns), learned)


def test_messages_that_are_asked_and_messages_that_answer(lm, chat_like, gpt_like):
    """Of a `prompt` and a `completion` that are messages, the latter alone is learned, whoever marks the answers."""
    rows = [{"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}]
    whole = said(*((m["role"], m["content"]) for m in MESSAGES))
    data = lm(rows, chat_like)
    assert text_of(data, chat_like) == (whole, "A2<|im_end|>")
    latter = "chat messages in 'prompt' and 'completion', of which the latter is learned"
    assert data.description == f"{latter}, each answer up to the token that ends it"
    marking = copy.deepcopy(chat_like)
    marking.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert text_of(lm(rows, marking), marking) == (whole, "A2<|im_end|>")
    with pytest.raises(UserError, match="row 0: the completion has no assistant message"):
        lm([{"prompt": MESSAGES[:4], "completion": MESSAGES[3:4]}], chat_like)
    with pytest.raises(UserError, match="the tokenizer has no chat template, so the conversations in 'prompt'"):
        lm(rows, gpt_like)


def test_the_end_is_learned_once_and_the_shift_reads_it(lm, gpt_like):
    data = lm([{"prompt": "ab", "completion": "cd"}], gpt_like)
    batch = PackedCollator(data.store, "next_token", micro_batch_size=1)([0])
    assert gpt_like.decode(batch.labels_R) == "cd<|end|>"
    assert batch.read_positions_R.tolist() == [1, 2, 3]


def test_a_template_that_is_named_writes_and_is_handed_on(lm, gpt_like, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}]
    tokenizer = copy.deepcopy(gpt_like)
    with pytest.raises(UserError, match=r"no chat template, so the conversations in 'messages' cannot be written"):
        lm(rows, tokenizer)
    with pytest.raises(UserError, match=r"dataset\.chat_template: there is no file 'mine\.jinja'"):
        lm(rows, tokenizer, chat_template="mine.jinja")
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    with pytest.raises(UserError, match=r"chat_template: '.*broken\.jinja' is no Jinja template: line 2: unexpected"):
        lm(rows, tokenizer, chat_template=str(tmp_path / "broken.jinja"))
    data = lm(rows, tokenizer, chat_template="plain")
    assert text_of(data, tokenizer) == ("<s>### User:\nhi\n\n### Assistant:\nyo<|end|>\n\n", "yo<|end|>")
    assert data.chat_template == PLAIN_TEMPLATE
    assert data.notes == ()
    file = tmp_path / "mine.jinja"
    for mark in ("!", "?"):  # what the file says counts, not its name
        file.write_text(PLAIN_TEMPLATE.replace("###", mark))
        data = lm(rows, tokenizer, chat_template=str(file))
        assert text_of(data, tokenizer)[0].startswith(f"<s>{mark} User:")
    asked = lm([{"prompt": "ab", "completion": "cd"}], tokenizer, chat_template="plain")
    assert text_of(asked, tokenizer) == ("<s>### User:\nab\n\n### Assistant:\ncd<|end|>\n\n", "cd<|end|>")
    plain = lm([{"text": "some words"}], tokenizer, chat_template="plain")
    assert plain.notes[0].startswith("dataset.chat_template is not used: these rows are plain text")


REWRITING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_templates_that_rewrite_earlier_turns(chat_like):
    tokenizer = copy.deepcopy(chat_like)
    tokenizer.chat_template = REWRITING
    messages = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
    ]  # fmt: skip
    text, spans = ChatTemplate(tokenizer).spans(messages)
    assert [text[start:end] for start, end in spans] == ["b<|im_end|>", "<think></think>d<|im_end|>"]


def test_a_cut_answer_counts_and_a_lost_one_is_a_bad_row(lm, gpt_like):
    rows = [
        {"prompt": "p" * 5, "completion": "c" * 2},
        {"prompt": "p" * 5, "completion": "c" * 50},
        {"prompt": "p" * 10, "completion": "c"},
    ]
    data = lm(rows, gpt_like, max_length=8, on_bad_row="skip")
    assert data.stats.truncated == 1
    assert text_of(data, gpt_like, 0) == ("pppppcc<|end|>", "cc<|end|>")
    assert text_of(data, gpt_like, 1) == ("pppppccc", "ccc")  # the answer goes on, so no end is learned
    assert data.stats.skipped_rows == (
        {"row": 2, "reason": "nothing of the answer is left: the prompt has 10 tokens and max_length is 8"},
    )


def test_long_plain_text_continues_in_further_samples(lm, gpt_like):
    text = "abcdefghijklmnopqrstuvwxyz"
    data = lm([{"text": text}, {"text": "short"}], gpt_like, max_length=10)
    parts = [text_of(data, gpt_like, i)[0] for i in range(len(data.store))]
    assert parts == ["abcdefghij", "jklmnopqrs", "stuvwxyz<|end|>", "short<|end|>"]
    assert data.store.rows.tolist() == [0, 0, 0, 1]
    assert (data.stats.rows, data.stats.used, data.stats.truncated) == (2, 4, 0)
    batch = PackedCollator(data.store, "next_token", micro_batch_size=3)([0, 1, 2])
    assert gpt_like.decode(batch.labels_R) == text[1:] + "<|end|>"  # each token is predicted exactly once


def test_chat_bad_rows(lm, chat_like):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = [{"messages": talk}, {"messages": []}, {"messages": talk[:1]}, {"messages": None}]
    data = lm(rows, chat_like, on_bad_row="skip")
    assert [(b["row"], b["reason"]) for b in data.stats.skipped_rows] == [
        (1, "the conversation is empty"),
        (2, "the conversation has no assistant message"),
        (3, "the conversation is empty"),
    ]


def test_conversations_as_json_text_are_conversations(lm, chat_like):
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    as_lists, as_text = lm([{"messages": turns}] * 2, chat_like), lm([{"messages": json.dumps(turns)}] * 2, chat_like)
    assert text_of(as_text, chat_like) == text_of(as_lists, chat_like)
    assert as_text.description == "chat messages in 'messages', each answer up to the token that ends it"
    with pytest.raises(UserError, match="row 1: the conversation is text and not a list of messages"):
        lm([{"messages": json.dumps(turns)}, {"messages": "Hi?"}], chat_like)
    assert lm([{"conversation": "He said hi."}] * 2, chat_like).description.startswith("plain text in 'conversation'")


def test_what_is_named_comes_before_messages_that_are_found(lm, chat_like):
    """Sets on the hub often have chats beside texts and prompts."""
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    rows = [{"messages": turns, "body": "Once upon", "prompt": "Q", "completion": "A"}] * 2
    assert lm(rows, chat_like).description == "chat messages in 'messages', each answer up to the token that ends it"
    assert lm(rows, chat_like, text_column="body").description.startswith("plain text in 'body'")
    assert lm(rows, chat_like, prompt_template="{prompt} =>").description.startswith("prompt → completion")
    named = {"text_column": "body", "messages_column": "messages"}
    assert (
        lm(rows, chat_like, **named).description
        == "chat messages in 'messages', each answer up to the token that ends it"
    )


def test_a_tokenizer_without_an_end_is_refused(lm, bert_like):
    with pytest.raises(UserError, match="has no end-of-sequence token"):
        lm([{"text": "x"}], bert_like)


def test_tools_go_to_templates_that_take_them(lm, chat_like):
    tokenizer = copy.deepcopy(chat_like)
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + chat_like.chat_template
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = [{"messages": talk, "tools": '[{"name": "search"}]'}]
    assert text_of(lm(rows, tokenizer), tokenizer)[0].startswith('[{"name": "search"}]<|im_start|>user')
    data = lm(rows, chat_like)
    assert data.notes == ("the column 'tools' is not used: the chat template has no place for tools",)
