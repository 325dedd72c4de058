"""Chat messages as text, and which characters of that text the assistant said.

The tokenizer's chat template decides how a conversation is written. Which part of it is the assistant's is found by
rendering: the text before an assistant turn ends where `messages[:i]` with a generation prompt ends, which is exactly
the prompt the model sees when it is asked for that turn later; the turn ends where `messages[:i + 1]` ends, its
end-of-turn token included, so the model learns to stop. Templates that rewrite earlier turns (dropping their reasoning)
are handled by looking for the turn's own words instead.

A tokenizer without a chat template gets `PLAIN_TEMPLATE`, and the plan says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

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


class BadChat(Exception):
    """A conversation cannot be used; the message says why."""


@dataclass(frozen=True)
class ChatTemplate:
    """Renders conversations with a tokenizer's template."""

    tokenizer: Any
    template: str | None = None
    """Used instead of the tokenizer's own."""

    @property
    def takes_tools(self) -> bool:
        return "tools" in str(self.template or self.tokenizer.chat_template or "")

    def text(self, messages: list[dict], tools: Any = None, prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self.template, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # whatever a template author chose to raise
            raise BadChat(f"the chat template refuses the messages: {error}") from error

    def spans(self, messages: list[dict], tools: Any = None) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the character ranges of the assistant's turns in it."""
        whole = self.text(messages, tools)
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                start = spans[-1][1] if spans else 0
                spans.append(self._span(whole, messages, turn, tools, start))
        if not spans:
            raise BadChat("the conversation has no assistant message")
        if not any(_says_something(message) for message in messages if message["role"] == "assistant"):
            raise BadChat("the assistant's messages are empty, so there is nothing to learn")
        return whole, spans

    def _span(self, whole: str, messages: list[dict], turn: int, tools: Any, after: int) -> tuple[int, int]:
        before = self.text(messages[:turn], tools, prompt=True) if turn else ""
        start = len(before) if turn and whole.startswith(before) else None
        through = whole if turn == len(messages) - 1 else self.text(messages[: turn + 1], tools)
        if start is not None and whole.startswith(through) and len(through.rstrip()) > start:
            return start, len(through.rstrip())
        words = str(messages[turn].get("content") or "").strip()
        found = whole.find(words, start if start is not None else after)
        if not words or found < 0:
            raise BadChat(f"message {turn} cannot be found in what the chat template makes of the conversation")
        end = found + len(words)
        stop = self.tokenizer.eos_token or ""
        if stop and whole.startswith(stop, end):
            end += len(stop)
        return (found if start is None else start), end


def _says_something(message: dict) -> bool:
    """Words, or whatever else a template may write out: tool calls, reasoning."""
    content = message["content"]
    words = content.strip() if isinstance(content, str) else content
    return bool(words) or any(value for key, value in message.items() if key not in ("role", "content"))


def normalised(messages: Any, system: str | None = None) -> list[dict]:
    """Messages as `role`/`content` records, whichever of the two usual spellings they came in."""
    if not messages:
        raise BadChat("the conversation is empty")
    if isinstance(messages, str):
        raise BadChat("the conversation is text and not a list of messages")
    result = [] if not system else [{"role": "system", "content": system}]
    for number, message in enumerate(messages):
        said = message.get("role") or message.get("from")
        if said is None:
            raise BadChat(f"message {number} has neither 'role' nor 'from'")
        content = message.get("content", message.get("value"))
        extras = {k: v for k, v in message.items() if k not in ("role", "from", "content", "value") and v is not None}
        if content is None and not extras:
            raise BadChat(f"message {number} has no content")
        result.append({"role": ROLES.get(str(said).lower(), str(said)), "content": content or "", **extras})
    return result


def parsed_tools(value: Any) -> Any:
    """Tool descriptions of a row, given as a list or as JSON text."""
    if not value:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadChat(f"the tools are not valid JSON: {error}") from error
    return value or None
