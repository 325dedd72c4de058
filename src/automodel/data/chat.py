"""Chat messages as text, and which characters of that text the assistant said.

The tokenizer's chat template decides how a conversation is written. Which part of it is the assistant's is found by
rendering: the text before an assistant turn ends where `messages[:i]` with a generation prompt ends, which is exactly
the prompt the model sees when it is asked for that turn later; the turn ends where `messages[:i + 1]` ends, its
end-of-turn token included, so the model learns to stop. Templates write a turn otherwise where others follow (Qwen3
drops its reasoning, Phi-3 ends the last one twice): there the turn is what changes when another one stands in its
place. A template that marks the answers itself (`{% generation %}`) knows better, and its marks are taken.

A tokenizer without a chat template needs one from the config, or `PLAIN_TEMPLATE`: a guessed one would train a model
that nobody else prompts the way it was trained.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.data.columns import is_list, is_mixed, is_string
from automodel.data.tool_calls import BadChat, called, function_of, read_calls, with_either_arguments, without_gaps

PLAIN_TEMPLATE = (
    "{{ bos_token if bos_token else '' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "### Assistant:\n{{ message['content'] }}{{ eos_token }}\n\n"
    "{% else %}"
    "### {{ message['role'] | capitalize }}:\n{{ message['content'] }}\n\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "observation": "tool",
    "function": "tool",
    "tool": "tool",
}


TURN_KEYS = ("role", "from", "content", "value")
MARKS = ("weight", "train")  # whether a message is learned; nothing that it says
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def template_text(asked: str | None, section: str) -> str | None:
    """The template that `chat_template` names: `plain`, or a file."""
    if asked is None or asked == PLAIN_TEMPLATE:
        return asked
    if asked == "plain":
        return PLAIN_TEMPLATE
    file = Path(asked).expanduser()
    if not file.is_file():
        raise UserError(
            f"{section}.chat_template: there is no file '{asked}'. Name a Jinja template's file, or `plain` for turns "
            "as '### User:' and '### Assistant:'."
        )
    return file.read_text(encoding="utf-8")


@dataclass(frozen=True)
class ChatTemplate:
    """Renders conversations with a tokenizer's template."""

    tokenizer: Any
    template: str | None = None
    """Used instead of the tokenizer's own."""

    @property
    def takes_tools(self) -> bool:
        return "tools" in str(self.template or self.tokenizer.chat_template or "")

    def turns(self, messages: Any, system: str | None = None) -> list[dict]:
        """Messages as the template takes them. What a developer says is a system prompt, where a template has no
        form for it."""
        template = str(self.template or self.tokenizer.chat_template or "")
        made = normalised(messages, system, "tool_calls" in template)
        if "developer" not in template:
            made = [{**m, "role": "system"} if m["role"] == "developer" else m for m in made]
        return made

    @property
    def marks_answers(self) -> bool:
        return _MARK.search(str(self.template or self.tokenizer.chat_template or "")) is not None

    def text(self, messages: list[dict], tools: Any = None, prompt: bool = False) -> str:
        return with_either_arguments(lambda m: self._rendered(m, tools, tokenize=False, prompt=prompt), messages)

    def whole_text(self, messages: list[dict], tools: Any = None, prompt: bool = False) -> str:
        """The text of messages none of which the template leaves out, as templates do with roles they do not know."""
        whole = self.text(messages, tools, prompt)
        for turn, message in enumerate(messages):
            role, words = message["role"], str(message.get("content") or "").strip()
            if not words or role == "assistant" or (role in ROLES.values() and words in whole):
                continue
            try:
                without = self.text([*messages[:turn], *messages[turn + 1 :]], tools, prompt)
            except BadChat:  # it is missed
                continue
            if without == whole:
                raise BadChat(f"the chat template leaves message {turn} out (its role is {role!r})")
        return whole

    def _rendered(self, messages: list[dict], tools: Any, tokenize: bool, prompt: bool = False, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self.template,
            tokenize=tokenize,
            add_generation_prompt=prompt,
            **options,
        )

    def spans(self, messages: list[dict], tools: Any = None, first: int = 0) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the places of the assistant's turns in it, from message `first` on."""
        answers = [turn for turn, message in enumerate(messages) if turn >= first and message["role"] == "assistant"]
        if not answers:
            others = sorted({message["role"] for message in messages} - set(ROLES.values()))
            spelt = f" (a role is spelt {', '.join(map(repr, others))})" if others else ""
            raise BadChat(f"the {'completion' if first else 'conversation'} has no assistant message{spelt}")
        learned = [turn for turn in answers if not left_out(messages[turn], turn)]
        if not learned:
            raise BadChat("every assistant message has weight 0 or train: false, so there is nothing to learn")
        if not any(_says_something(messages[turn]) for turn in learned):
            raise BadChat("the assistant's messages are empty, so there is nothing to learn")
        whole = self.whole_text(messages, tools)
        if self.marks_answers:
            asked = self.text(messages[:first], tools, prompt=True) if first else ""
            spans = [(start, end) for start, end in self._marked(messages, tools) if end > len(asked)]
            written = ["".join(whole[start:end] for start, end in spans)] * len(answers)
        else:
            spans = []
            for turn in answers:
                start, end = self._span(whole, messages, turn, tools, spans[-1][1] if spans else 0)
                spans.append((self.answer_start(whole[:start]), end))
            written = [whole[start:end] for start, end in spans]
        for turn, words in zip(answers, written):
            _check_calls_are_written(words, messages[turn], turn)
        if len(learned) < len(answers):
            if len(spans) != len(answers):
                raise BadChat(
                    "of a message with weight 0, the chat template does not mark the place ({% generation %})"
                )
            spans = [span for span, turn in zip(spans, answers) if turn in learned]
        return whole, spans

    def answer_start(self, before: str) -> int:
        """Where the answer begins behind a text that the template wrote for it: spaces are the answer's own, as in
        `language.py` (" 42" is three tokens to some tokenizers, " Paris" one). One that marks answers has said it."""
        return len(before if self.marks_answers else before.rstrip(" "))

    def _marked(self, messages: list[dict], tools: Any) -> list[tuple[int, int]]:
        """The ranges that a template with `{% generation %}` marks, as it is rendered: no tokenizer is asked, and those
        written in Python could not answer."""
        from transformers.utils.chat_template_utils import render_jinja_template

        wanted: dict[str, Any] = {
            "chat_template": self.tokenizer.get_chat_template(self.template, tools),
            "return_assistant_tokens_mask": True,
            **self.tokenizer.special_tokens_map,
        }
        _, marks = with_either_arguments(lambda m: render_jinja_template([m], tools=tools, **wanted), messages)
        spans = [(start, end) for start, end in marks[0] if end > start]
        if not spans:
            raise BadChat("the chat template marks nothing of the conversation as the assistant's ({% generation %})")
        return spans

    def _span(self, whole: str, messages: list[dict], turn: int, tools: Any, after: int) -> tuple[int, int]:
        before = self.text(messages[:turn], tools, prompt=True) if turn else ""
        start = len(before) if turn and whole.startswith(before) else None
        through = whole if turn == len(messages) - 1 else self.text(messages[: turn + 1], tools)
        if start is not None and whole.startswith(through) and len(through.rstrip()) > start:
            return start, len(through.rstrip())
        found = self._place(whole, messages, turn, tools)
        if found is None and start is not None:
            found = _shortened(whole, through.rstrip(), start)
        if found is None:
            found = self._place_of_words(whole, messages[turn], start if start is not None else after)
        if found is None or found[1] <= (start or 0):
            raise BadChat(f"message {turn} cannot be found in what the chat template makes of the conversation")
        return (found[0] if start is None else start), found[1]

    def _place(self, whole: str, messages: list[dict], turn: int, tools: Any) -> tuple[int, int] | None:
        """Where a turn stands in the whole: between what is written before and behind another one in its place; with
        the special tokens that end it, which are behind it where it is the last of all as well."""
        other = [*messages[:turn], {"role": "assistant", "content": _STAND_IN}]
        try:
            before, found, behind = self.text([*other, *messages[turn + 1 :]], tools).partition(_STAND_IN)
            alone = self.text(other, tools).partition(_STAND_IN)[2]
        except BadChat:  # a tool's result wants the call before it
            return None
        start, end = len(before), len(whole) - len(behind)
        if not found or start >= end or not whole.startswith(before) or not whole.endswith(behind):
            return None
        return start, end + self._ending(behind, alone)

    def _ending(self, behind: str, alone: str) -> int:
        """Characters of the special tokens that both texts begin with."""
        names = {*self.tokenizer.all_special_tokens, *map(str, self.tokenizer.added_tokens_decoder.values())} - {""}
        token = re.compile(r"\s*(?:" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")
        end = 0
        while names and (found := token.match(behind, end)) and alone.startswith(behind[: found.end()]):
            end = found.end()
        return end

    def _place_of_words(self, whole: str, message: dict, after: int) -> tuple[int, int] | None:
        words, stop = str(message.get("content") or "").strip(), self.tokenizer.eos_token or ""
        found = whole.find(words, after) if words else -1
        end = found + len(words)
        return None if found < 0 else (found, end + (len(stop) if whole.startswith(stop, end) else 0))


_STAND_IN = "\ue000\ue001\ue000"  # characters that no text has


def _shortened(whole: str, through: str, start: int) -> tuple[int, int] | None:
    """The place of a turn of which the whole has only the end: its reasoning is left out."""
    for first in range(start, len(through)):
        if whole.startswith(through[first:], start):
            return start, start + len(through) - first
    return None


def _says_something(message: dict) -> bool:
    """Words, or whatever else a template may write out: tool calls, reasoning."""
    content = message["content"]
    words = content.strip() if isinstance(content, str) else content
    return bool(words) or any(value for key, value in message.items() if key not in ("role", "content", *MARKS))


def _check_calls_are_written(written: str, message: dict, turn: int) -> None:
    for call in message.get("tool_calls", ()):
        name = function_of(call).get("name")
        if name is not None and str(name) not in written:
            raise BadChat(f"message {turn} calls '{name}', but the chat template has no place for tool calls")


def holds_chats(rows: Any, column: str, feature: Any) -> bool:
    """Whether a column has conversations: lists, or lists written as JSON text (its first row tells, where there are
    rows to look at)."""
    if is_list(feature) or is_mixed(feature):
        return True
    known = is_string(feature) and hasattr(rows, "__getitem__") and len(rows) > 0
    found = _list_in(rows[0][column] or "") if known else None
    return (
        isinstance(found, list) and bool(found) and all(isinstance(m, dict) and {*m} & {"role", "from"} for m in found)
    )


def _list_in(text: str) -> Any:
    """The list that a text holds as JSON; any other text as it is."""
    try:
        return json.loads(text) if text.lstrip().startswith("[") else text
    except ValueError:
        return text


def normalised(messages: Any, system: str | None = None, calls: bool = False) -> list[dict]:
    """Messages as `role`/`content` records, whichever of the two usual spellings they came in. `calls`: turns that are
    a tool call in JSON (ShareGPT's `function_call`) become calls, for templates that have a form for them."""
    if not messages:
        raise BadChat("the conversation is empty")
    messages = _list_in(messages) if isinstance(messages, str) else messages
    if not isinstance(messages, (list, tuple)):
        kind = "text" if isinstance(messages, str) else f"a {type(messages).__name__}"
        raise BadChat(f"the conversation is {kind} and not a list of messages")
    result: list[dict] = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadChat(f"message {number} is {str(message)[:40]!r} and not a record with 'role' and 'content'")
        said = message.get("role") or message.get("from")
        if said is None:
            raise BadChat(f"message {number} has neither 'role' nor 'from'")
        content = _as_text(message.get("content", message.get("value")), number)
        extras = {k: without_gaps(v) for k, v in message.items() if k not in TURN_KEYS and v is not None}
        if calls and str(said).lower() == "function_call" and (found := called(content)) is not None:
            content, extras["tool_calls"] = None, found
        if extras.get("tool_calls"):
            extras["tool_calls"] = read_calls(extras["tool_calls"], number)
        if content is None and not extras.keys() - set(MARKS):
            raise BadChat(f"message {number} has no content")
        result.append({"role": ROLES.get(str(said).lower(), str(said)), "content": content or "", **extras})
    return result if not system else _with_system(result, system)


def _with_system(messages: list[dict], system: str) -> list[dict]:
    """The messages behind the system prompt that stands beside them, where it is not their first one already."""
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if first["content"].strip() == system.strip():
        return messages
    raise BadChat("the conversation begins with a system message and another one stands beside it; keep one of them")


def left_out(message: dict, number: int) -> bool:
    """Whether the data say that an answer is not to be learned: `weight: 0`, as OpenAI writes it, or `train: false`."""
    for key in MARKS:
        if message.get(key) not in (None, 0, 1):  # true and false are these numbers
            raise BadChat(f"message {number} has {key} {message[key]!r}; 1 (learned) and 0 (only read) are possible")
    return any(message.get(key) == 0 for key in MARKS)


def _as_text(content: Any, number: int) -> Any:
    """Content given in parts (`[{"type": "text", "text": …}]`), as one text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise BadChat(f"the content of message {number} is {str(content)[:40]} and not text")
    kinds = {str(part.get("type", "text")) if isinstance(part, dict) else type(part).__name__ for part in content}
    if kinds - {"text"}:
        others = ", ".join(sorted(kinds - {"text"}))
        raise BadChat(f"message {number} has parts that are not text ({others})")
    return "".join(part.get("text") or "" for part in content)
