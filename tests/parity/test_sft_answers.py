"""`assistant_only_loss` with chat templates that do not mark answers: tokens, and what is learned of them, are those of
TRL's training form, for every family of templates that TRL has one of."""

from __future__ import annotations

import pytest

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.trainer.sft_rows import RowFormat
from marked_words import TEMPLATES, words

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'automodel-finetune[compare]'")
chat_template_utils = pytest.importorskip("trl.chat_template_utils")

FAMILIES = (
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "diffusion_gemma", "gemma", "gemma3", "glm4moe", "gptoss",
    "lfm2", "lfm2_v2", "llama3", "muse_glimmer", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra",
    "nemotron_3_5_lightning", "phi3", "phi3_5", "qwen2_5", "qwen2_5_vl", "qwen3", "qwen3_instruct_2507", "qwen3_vl",
    "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8",
)  # fmt: skip
PICTURES = {"idefics3", "smolvlm", "llava_next"}
"""Their templates write messages of text and pictures alone; models for pictures are not trained here."""
ASKED = {"role": "user", "content": "what is bad"}
MORE = {"role": "user", "content": "more plot"}
GOOD = {"role": "assistant", "content": "good film"}
FINE = {"role": "assistant", "content": "fine actor"}
THOUGHT = {"role": "assistant", "content": "<think>\nthe story\n</think>\n\nfine actor"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"a": 2}}}],
}
RESULT = {"role": "tool", "name": "look", "content": "it is fine"}
CHATS = {
    "one turn": [ASKED, GOOD],
    "a system prompt": [{"role": "system", "content": "plot it"}, ASKED, GOOD],
    "two turns": [ASKED, GOOD, MORE, FINE],
    "a question at the end": [ASKED, GOOD, MORE],
    "the same words": [{"role": "user", "content": "good film"}, GOOD, {"role": "user", "content": "good film"}, GOOD],
    "a call": [ASKED, CALL, RESULT, GOOD],
    "words and a call": [ASKED, {**CALL, "content": "more plot"}, RESULT, GOOD, MORE, FINE],
    "reasoning": [ASKED, THOUGHT, MORE, THOUGHT],
}
NO_CALLS = (
    "cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl",
)  # fmt: skip
"""Their templates have no place for calls of tools. TRL trains such conversations without the calls; here they are
refused, as in a run of a YAML file."""
NO_PLACE = "no place for tool calls|roles must alternate|leaves message|cannot be found|the middle of message"
REFUSED = {("gemma", "a system prompt"): "System role not supported"} | {
    (family, kind): NO_PLACE for family in NO_CALLS for kind in ("a call", "words and a call")
}


def test_every_family_of_trls_is_here():
    there = {file.name.removesuffix("_training.jinja") for file in TEMPLATES.glob("*_training.jinja")}
    assert there == {*FAMILIES} | PICTURES


@pytest.mark.parametrize(
    ("family", "kind"),
    # DiffusionGemma, which is no causal language model, takes the results of tools into the answer.
    [(f, k) for f in FAMILIES for k in CHATS if f != "diffusion_gemma" or "call" not in k],
)
def test_the_answers_of_trls_training_form(family, kind):
    tokenizer, chat = words(family), CHATS[kind]
    training = chat_template_utils.get_training_chat_template(tokenizer)
    assert training is not None
    if (family, kind) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[family, kind]):
            RowFormat(tokenizer, "text", None, None, assistant_only=True)({"messages": chat})
        return
    theirs = tokenizer.apply_chat_template(
        chat, chat_template=training, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = RowFormat(tokenizer, "text", None, None, assistant_only=True)({"messages": chat})
    assert tokenizer.decode(ours["input_ids"]) == tokenizer.decode(theirs["input_ids"])
    assert ours["input_ids"] == theirs["input_ids"]
    learned = [token for token, label in zip(ours["input_ids"], ours["labels"]) if label != IGNORE]
    expected = [token for token, mark in zip(theirs["input_ids"], theirs["assistant_masks"]) if mark]
    assert tokenizer.decode(learned) == tokenizer.decode(expected)
    assert [label != IGNORE for label in ours["labels"]] == [bool(mark) for mark in theirs["assistant_masks"]]
    assert expected


def test_keywords_and_tools_of_a_row_reach_the_template():
    tokenizer = words("qwen3")
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    row = {"messages": CHATS["a call"], "tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}
    training = chat_template_utils.get_training_chat_template(tokenizer)
    theirs = tokenizer.apply_chat_template(
        row["messages"], tools=[tool], chat_template=training, enable_thinking=False, tokenize=True, return_dict=True,
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    ours = RowFormat(tokenizer, "text", None, None, assistant_only=True)(row)
    assert ours["input_ids"] == theirs["input_ids"]
    assert [label != IGNORE for label in ours["labels"]] == [bool(mark) for mark in theirs["assistant_masks"]]


def test_templates_that_nobody_knows_are_learned_as_a_run_of_a_yaml_file_learns_them():
    tokenizer = words("qwen3")
    tokenizer.chat_template = (
        "{% for m in messages %}({{ m['role'] }}) {{ m['content'] }} <|end|> \n {% endfor %}"
        "{% if add_generation_prompt %}(assistant) {% endif %}"
    )
    with pytest.raises(ValueError, match="not training-compatible"):
        chat_template_utils.get_training_chat_template(tokenizer)
    ours = RowFormat(tokenizer, "text", None, None, assistant_only=True)({"messages": CHATS["two turns"]})
    learned = [token for token, label in zip(ours["input_ids"], ours["labels"]) if label != IGNORE]
    assert tokenizer.decode(learned) == "good film <|end|> fine actor <|end|>"


def test_a_conversation_without_an_answer_teaches_nothing():
    ours = RowFormat(words("qwen3"), "text", None, None, assistant_only=True)({"messages": [ASKED]})
    assert {*ours["labels"]} == {IGNORE}
