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

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.config.names import near
from automodel.data.messages import MARKS, ROLES, left_out, normalised
from automodel.data.tool_calls import BadChat, function_of, in_wrappers, parsed_tools, with_either_arguments

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

REASONING = ("reasoning_content", "reasoning", "thinking")  # as servers and templates call it
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
    template = file.read_text(encoding="utf-8")
    _check_syntax(template, asked, section)
    return template


def _check_syntax(template: str, file: str, section: str) -> None:
    """Once, and not for every row."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    fault = ""
    try:
        render_jinja_template([[]], chat_template=template)
    except TemplateSyntaxError as error:
        fault = f"line {error.lineno}: {str(error.message).rstrip('.')}"
    except Exception:
        return  # a template may refuse a conversation without messages
    if fault:
        raise UserError(f"{section}.chat_template: '{file}' is no Jinja template: {fault}. Put it right.")


@dataclass(frozen=True)
class ChatTemplate:
    """Renders conversations with a tokenizer's template."""

    tokenizer: Any
    template: str | None = None
    """Used instead of the tokenizer's own."""

    @property
    def takes_tools(self) -> bool:
        return "tools" in str(self.template or self.tokenizer.chat_template or "")

    def tools(self, value: Any) -> Any:
        """Descriptions of tools as the template takes them: bare ones (Glaive's) are wrapped as OpenAI's are where it
        refuses them (Gemma 4, gpt-oss)."""
        tools = parsed_tools(value)
        wrapped = in_wrappers(tools)
        if wrapped == tools or self._part([{"role": "user", "content": _STAND_IN}], tools) is not None:
            return tools
        return wrapped

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
        """The text of messages none of which the template leaves out, as templates do with roles they do not know, and
        those that expect lists of parts with text."""
        whole = self.text(messages, tools, prompt)
        for turn, message in enumerate(messages):
            role, words = message["role"], str(message.get("content") or "").strip()
            if not words or message.get("tool_calls") or (role in ROLES.values() and words in whole):
                continue
            if self._part(_with_other_words(messages, turn), tools, prompt) == whole:
                raise BadChat(f"the chat template leaves message {turn} out (its role is {role!r})")
        return whole

    def _part(self, messages: list[dict], tools: Any, prompt: bool = False) -> str | None:
        """The text of messages that nobody wrote as they are; none where the template refuses them: it may want a
        question before the first answer, or a call before its result."""
        try:
            return self.text(messages, tools, prompt)
        except BadChat:
            return None

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
        _check_roles_are_spelt(messages)
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
        last = turn == len(messages) - 1
        before = self._part(messages[:turn], tools, prompt=True) if turn else None
        start = len(before) if before is not None and whole.startswith(before) else None
        through = whole if last else self._part(messages[: turn + 1], tools)
        if start is not None and through is not None and whole.startswith(through) and len(through.rstrip()) > start:
            return start, len(through.rstrip())
        known = after or all(m["role"] != "assistant" for m in messages[:turn])  # where the last answer ended
        found = self._place(whole, messages, turn, tools)
        if found is None and start is None and before is not None and through is not None and known:
            found = self._by_itself(whole, through.removeprefix(before), messages, turn, tools, after)
        if found is None and start is not None and through is not None:
            found = _shortened(whole, through.rstrip(), start)
        if found is None:
            found = self._place_of_words(whole, messages[turn], start if start is not None else after)
        if found is None or found[1] <= (start or 0):
            raise BadChat(f"message {turn} cannot be found in what the chat template makes of the conversation")
        if start is None:
            start = self._opened(whole, messages, turn, found[0], tools, after) if known else found[0]
        found = start, found[1]
        if not last and self._stands_in(whole, messages, turn + 1, tools, found):
            raise BadChat(f"the chat template writes message {turn + 1} into the middle of message {turn}")
        return found

    def _place(self, whole: str, messages: list[dict], turn: int, tools: Any) -> tuple[int, int] | None:
        """Where a turn stands in the whole: between what is written before and behind another one in its place; with
        the special tokens that end it, which are behind it where it is the last of all as well."""
        other = [*messages[:turn], {"role": "assistant", "content": _STAND_IN}]
        changed, ended = self._part([*other, *messages[turn + 1 :]], tools), self._part(other, tools)
        if changed is None or ended is None:
            return None
        before, found, behind = changed.partition(_STAND_IN)
        start, end = _alike(whole, before), len(whole) - len(behind)
        if start < len(before):  # the turn has reasoning where the other one has an empty place for it
            asked = self._part(messages[:turn], tools) if turn else None
            if asked is None or start < len(asked) or not whole.startswith(asked):
                return None
        if not found or start >= end or not whole.endswith(behind):
            return None
        return start, end + self._ending(behind, ended.partition(_STAND_IN)[2])

    def _by_itself(
        self, whole: str, own: str, messages: list[dict], turn: int, tools: Any, after: int
    ) -> tuple[int, int] | None:
        """Where a call stands that is written as ever, behind turns that are not: Mistral's templates tell of tools in
        the last question alone."""
        own, calls = own.rstrip(), messages[turn].get("tool_calls") or []
        place = whole.find(own, after) if calls and own.endswith(tuple(self._special())) else -1
        others = [{**call, "function": {**function_of(call), "name": _STAND_IN}} for call in calls]
        other = [*messages[:turn], {**messages[turn], "tool_calls": others}, *messages[turn + 1 :]]
        changed = self._part(other, tools) if place >= 0 else None
        if changed is None or not place <= _alike(whole, changed) < place + len(own):
            return None
        return place, place + len(own)

    def _opened(self, whole: str, messages: list[dict], turn: int, start: int, tools: Any, after: int) -> int:
        """Where a turn begins whose words do at `start`: behind what opens an answer, if that stands before them. What
        comes in between (gpt-oss' channel) is the model's to say."""
        roles = [message["role"] for message in messages]
        asked = messages[: roles.index("user") + 1] if "user" in roles else messages[:turn]
        without, opened = self._part(asked, tools), self._part(asked, tools, prompt=True)
        opening = opened[len(without) :] if without and opened and opened.startswith(without) else ""
        place = whole.find(opening, after, start) if opening else -1
        return start if place < 0 else place + len(opening)

    def _stands_in(self, whole: str, messages: list[dict], turn: int, tools: Any, span: tuple[int, int]) -> bool:
        """Whether words of this message stand in the place of another one (Gemma 4 has a tool's result before what was
        said along with the call): they would be learned."""
        words = messages[turn]["content"].strip()
        if messages[turn]["role"] == "assistant" or not words or words not in whole[slice(*span)]:
            return False
        changed = self._part(_with_other_words(messages, turn), tools)
        return changed is not None and span[0] <= _alike(whole, changed) < span[1]

    def _ending(self, behind: str, alone: str) -> int:
        """Characters of the special tokens that both texts begin with."""
        names = self._special()
        token = re.compile(r"\s*(?:" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")
        end = 0
        while names and (found := token.match(behind, end)) and alone.startswith(behind[: found.end()]):
            end = found.end()
        return end

    def _special(self) -> set[str]:
        return {*self.tokenizer.all_special_tokens, *map(str, self.tokenizer.added_tokens_decoder.values())} - {""}

    def _place_of_words(self, whole: str, message: dict, after: int) -> tuple[int, int] | None:
        words, stop = str(message.get("content") or "").strip(), self.tokenizer.eos_token or ""
        found = whole.find(words, after) if words else -1
        end = found + len(words)
        return None if found < 0 else (found, end + (len(stop) if whole.startswith(stop, end) else 0))


_STAND_IN = "\ue000\ue001\ue000"  # characters that no text has


def _with_other_words(messages: list[dict], turn: int) -> list[dict]:
    return [*messages[:turn], {**messages[turn], "content": _STAND_IN}, *messages[turn + 1 :]]


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


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


def _check_roles_are_spelt(messages: list[dict]) -> None:
    """A misspelt `assistant` would be an answer that is not learned, without a word: most templates write any role."""
    known = sorted(set(ROLES.values()))
    for turn, message in enumerate(messages):
        role = message["role"]
        if role not in known and (guess := near(role, known, cutoff=0.8)):
            raise BadChat(f"message {turn} has the role {role!r}; did you mean {guess!r}?")


def _check_calls_are_written(written: str, message: dict, turn: int) -> None:
    for call in message.get("tool_calls", ()):
        name = function_of(call).get("name")
        if name is not None and str(name) not in written:
            raise BadChat(f"message {turn} calls '{name}', but the chat template has no place for tool calls")


def unsaid(whole: str, messages: list[dict]) -> bool:
    """Whether a template leaves out what an assistant says along with a call (Llama 3.1), or the reasoning of the last
    answer (DeepSeek-R1, and every template that has no place for it). That of earlier answers many leave out."""
    spoken = [message for message in messages if message["role"] == "assistant"]
    words = [m["content"].rpartition("</think>")[2] for m in spoken if m.get("tool_calls")]
    for last in spoken[-1:]:
        words += [last.get(key) for key in REASONING]
        words.append(str(last["content"]).rpartition("</think>")[0].rpartition("<think>")[2])
    return any(isinstance(part, str) and part.strip() not in whole for part in words)
