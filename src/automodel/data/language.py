"""Causal language modelling: instructions with answers, chats, and plain text.

Every layout ends in the same form: a text and the character ranges in it that are to be learned. The text is tokenised
once and a token carries a label where it reaches into such a range, so prompt and answer meet exactly as they will when
the model is asked. An answer ends with the end-of-sequence token, supervised: that is how a model learns to stop.
A row whose answer is cut away entirely by `max_length` is a bad row.

Plain text is not cut (unless `on_long: cut` asks for it): a document longer than `max_length` continues in further
samples, each starting with the last token of the one before, so every token is predicted exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from automodel.config.errors import UserError
from automodel.config.names import near
from automodel.data import prompt_template
from automodel.data.batch import IGNORE
from automodel.data.chat import ChatTemplate, unsaid
from automodel.data.classify import text_problem
from automodel.data.python_tokenizers import learned_tokens
from automodel.data.samples import SampleWriter
from automodel.data.special_tokens import special_ids
from automodel.data.tool_calls import BadChat
from automodel.data.written_answers import read_answer
from automodel.data.written_numbers import as_written

ANSWER_ROLES = ("answer", "answers", "completion", "output", "response", "target")

# Layouts found by their column names: prompt columns, then the answer's.
KNOWN_LAYOUTS = (
    (("context", "question"), ("answers", "answer")),
    (("instruction", "input"), ("output", "response")),
    (("instruction", "context"), ("response", "output")),
    (("instruction",), ("output", "response", "completion")),
    (("prompt",), ("completion", "response", "answer", "output")),
    (("question",), ("answer", "answers", "response")),
    (("query",), ("response", "answer")),
)

PROMPT_ROLES = {role for prompt, _ in KNOWN_LAYOUTS for role in (*prompt, "system")}


def places_of(template: str, where: str) -> list[str]:
    """What stands in braces in a prompt's template. `where`: what the key is written behind, such as `dataset.`."""
    try:
        return prompt_template.places_of(template)
    except ValueError as error:
        raise UserError(f"{where}prompt_template {error}") from error


def check_prompt(section: str, template: str | None, prompt: Iterable[str], answer: str) -> None:
    """`prompt`: columns that it is made of."""
    if template is not None and not places_of(template, f"{section}."):
        raise UserError(f"{section}.prompt_template has no place for a column, such as {{question}}.")
    if answer in prompt:
        raise UserError(
            f"{section}: the column '{answer}' is in the prompt and is to be learned as its answer, which could be "
            "copied. Name another one (column_mapping, prompt_template)."
        )


def answer_meant(roles: Iterable[str]) -> str:
    """A hint where one of the roles looks like an answer's, misspelt, and like nothing else."""
    words = [*ANSWER_ROLES, *sorted(PROMPT_ROLES)]
    closest = (near(role, words, cutoff=0.5) for role in roles if role not in PROMPT_ROLES)
    return next((f" Did you mean '{word}'?" for word in closest if word in ANSWER_ROLES), "")


@dataclass(frozen=True)
class Spanned:
    """A text and what is to be learned of it."""

    row: int
    text: str
    spans: list[tuple[int, int]]
    unsaid: bool = False
    """Whether the chat template left something of the answers out."""


def add_spanned(
    tokenizer: Any, texts: list[Spanned], max_length: int, everything: bool, special: bool, out: SampleWriter
) -> None:
    """Tokenise texts and label the tokens that reach into their spans. `special` adds the tokenizer's own special
    tokens (chat templates write them themselves)."""
    if not texts:
        return
    made = learned_tokens(tokenizer, [t.text for t in texts], [t.spans for t in texts], special)
    # A word that is not known is no end, unless it is the same token (GPT-2). Asked once: it takes up to 0.1 ms.
    ends = special_ids(tokenizer) - {tokenizer.unk_token_id} | {tokenizer.eos_token_id}
    for text, (ids, learned) in zip(texts, made, strict=True):
        if text.spans[-1][1] >= len(text.text.rstrip()):
            ids, learned = _stopped(ids, learned, tokenizer.eos_token_id, ends)
        if everything:
            learned[:] = True
        labels = np.where(learned, ids, IGNORE)
        if not learned[1:max_length].any():
            prompt = int(np.argmax(learned)) if learned.any() else len(ids)
            out.reject(
                text.row,
                f"nothing of the answer is left: the prompt has {prompt:,} tokens and max_length is {max_length:,}",
            )
            continue
        out.unsaid += text.unsaid
        out.add(text.row, ids[:max_length], token_labels=labels[:max_length], whole=len(ids))


def _stopped(ids: np.ndarray, learned: np.ndarray, eos: int, ends: set[int]) -> tuple[np.ndarray, np.ndarray]:
    """The same tokens with a supervised end: the one that is there, or the end-of-sequence token."""
    last = np.flatnonzero(learned)
    if len(ids) and ids[-1] == eos:
        learned[-1] = True
    elif not (len(last) and int(ids[last[-1]]) in ends):
        end = len(ids) if not len(last) else last[-1] + 1  # what follows the last learned token is at most whitespace
        ids, learned = ids[:end], learned[:end]
        return np.append(ids, eos), np.append(learned, True)
    return ids, learned


def answer_text(value: Any) -> Any:
    """The answer of a row: text, the first of several, or SQuAD's record of texts and offsets."""
    value = read_answer(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        value = value.get("text")
    if isinstance(value, (list, tuple)):
        return answer_text(value[0]) if value else None
    return as_written(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


@dataclass(frozen=True)
class Instructions:
    """A prompt made of columns, and an answer."""

    tokenizer: Any
    prompt: dict[str, str]
    """Role to column, e.g. `{"context": "context", "question": "q"}`."""
    answer: str
    """Column of the answer."""
    max_length: int
    answer_only: bool
    template: str | None = None
    """The user's own `prompt_template`, with `{column}` or `{role}` places."""
    chat: ChatTemplate | None = None
    """Where the model has a chat template, prompt and answer become a user and an assistant message."""
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.prompt.values(), self.answer]))

    @property
    def record(self) -> dict[str, Any]:
        """What `encoder_of` needs to write such prompts again."""
        own = {"prompt": self.prompt, "answer": self.answer, "prompt_template": self.template}
        return {"kind": "instructions", **own, "chat_template": self.chat is not None}

    def encode(self, rows: dict[str, list], first: int, out: SampleWriter) -> None:
        texts = []
        for i in range(len(rows[self.answer])):
            answer = answer_text(rows[self.answer][i])
            fields = {role: rows[column][i] for role, column in self.prompt.items()}
            problem = text_problem(answer, "answer") or self._prompt_problem(fields)
            if problem:
                out.reject(first + i, problem)
                continue
            try:
                texts.append(self._text(first + i, fields, answer))
            except BadChat as error:
                out.reject(first + i, str(error))
        special = self.chat is None
        add_spanned(self.tokenizer, texts, self.max_length, not self.answer_only, special, out)

    def _prompt_problem(self, fields: dict[str, Any]) -> str | None:
        """The last column of a prompt (the question, the prompt itself) must say something. Alpaca's `input` and a
        context may be empty, or a number; but what is no text, Parquet's bytes or HotpotQA's record of paragraphs,
        would stand in the prompt as Python prints it."""
        leading = [role for role in fields if role not in ("input", "context", "system")] or list(fields)
        for role, value in fields.items():
            usable = value is None or isinstance(value, str | int | float)
            problem = text_problem(value, role) if role in leading or not usable else None
            if problem:
                return problem
        return None

    def _text(self, row: int, fields: dict[str, Any], answer: str) -> Spanned:
        words = {role: "" if value is None else as_written(value) for role, value in fields.items()}
        if self.chat is not None:
            system = [{"role": "system", "content": words["system"]}] if words.get("system") else []
            asked = {"role": "user", "content": chat_prompt(words)}
            messages = [*system, asked, {"role": "assistant", "content": answer}]
            text, spans = self.chat.spans(messages)
            return Spanned(row, text, spans, unsaid(text, messages))
        if self.template is not None:
            by_column = {column: words[role] for role, column in self.prompt.items()}
            before = self.template.format(**{**by_column, **words})
        else:
            before = plain_prompt(words)
        # One space between "Answer:" and the answer; a raw prompt and its completion are joined as they are.
        joint = "" if before[-1:].isspace() or answer[:1].isspace() or set(words) == {"prompt"} else " "
        # Spaces before an answer are its own, whoever wrote them: " Paris" is one token to most tokenizers, and what
        # follows a prompt that ends in a space of its own was never learned.
        start = len(before.rstrip(" "))
        return Spanned(row, before + joint + answer, [(start, len(before + joint + answer))])


def chat_prompt(words: dict[str, str]) -> str:
    """The user's message for a chat model."""
    words = {role: w for role, w in words.items() if role != "system"}
    if "instruction" in words:
        parts = [words["instruction"], *_given(words)]
    elif len(words) == 1:
        parts = list(words.values())
    else:
        parts = [f"{role.capitalize()}: {w}" for role, w in words.items() if w]
    return "\n\n".join(part for part in parts if part)


def plain_prompt(words: dict[str, str]) -> str:
    """The prompt for a model without a chat template."""
    if set(words) == {"prompt"}:
        return words["prompt"]
    if "instruction" in words:
        system = f"{words['system']}\n\n" if words.get("system") else ""
        extra = "\n\n".join(_given(words))
        given = f"\n\n### Input:\n{extra}" if extra else ""
        return f"{system}### Instruction:\n{words['instruction']}{given}\n\n### Response:\n"
    lines = [f"{role.capitalize()}: {w}" for role, w in words.items() if w]
    return "\n\n".join([*lines, "Answer:"])


def _given(words: dict[str, str]) -> list[str]:
    """What comes with an instruction: its input and context as they are, other columns under their names."""
    bare = [words[role] for role in ("input", "context") if words.get(role)]
    others = {role: w for role, w in words.items() if w and role not in ("system", "instruction", "input", "context")}
    return [*bare, *(f"{role.capitalize()}: {w}" for role, w in others.items())]


@dataclass(frozen=True)
class Chats:
    """Conversations, written by the chat template; only the assistant's turns are learned."""

    tokenizer: Any
    messages: str
    max_length: int
    answer_only: bool
    chat: ChatTemplate
    tools: str | None = None
    system: str | None = None
    completion: str | None = None
    """Column of further messages, of which alone something is learned; `messages` is then what is asked."""
    notes: tuple[str, ...] = field(default=())

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in (self.messages, self.tools, self.system, self.completion) if name)

    @property
    def record(self) -> dict[str, Any]:
        return {"kind": "chats", "messages": self.messages, "tools": self.tools, "system": self.system}

    def encode(self, rows: dict[str, list], first: int, out: SampleWriter) -> None:
        texts = []
        for i, messages in enumerate(rows[self.messages]):
            try:
                system = rows[self.system][i] if self.system else None
                tools = self.chat.tools(rows[self.tools][i]) if self.tools else None
                turns = self.chat.turns(messages, system)
                answer = self.chat.turns(rows[self.completion][i]) if self.completion else []
                text, spans = self.chat.spans([*turns, *answer], tools, len(turns) if answer else 0)
                texts.append(Spanned(first + i, text, spans, unsaid(text, [*turns, *answer])))
            except BadChat as error:
                out.reject(first + i, str(error))
        add_spanned(self.tokenizer, texts, self.max_length, not self.answer_only, False, out)


@dataclass(frozen=True)
class PlainText:
    """Documents to continue pretraining on; every token is learned."""

    tokenizer: Any
    text: str
    max_length: int
    split: bool = True
    """Continue long documents in further samples; otherwise they are cut."""
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text,)

    @property
    def record(self) -> dict[str, Any]:
        return {"kind": "plain text", "text": self.text}

    def encode(self, rows: dict[str, list], first: int, out: SampleWriter) -> None:
        kept = []
        for i, text in enumerate(rows[self.text]):
            problem = text_problem(text)
            if problem:
                out.reject(first + i, problem)
            else:
                kept.append(i)
        if not kept:
            return
        encoded = self.tokenizer([rows[self.text][i] for i in kept], return_attention_mask=False, verbose=False)
        for position, i in enumerate(kept):
            ids = encoded["input_ids"][position]
            if not ids or ids[-1] != self.tokenizer.eos_token_id:
                ids = [*ids, self.tokenizer.eos_token_id]
            if len(ids) < 2:
                out.reject(first + i, "the text has no tokens")
                continue
            if not self.split:
                ids, whole = ids[: self.max_length], len(ids)
                out.add(first + i, ids, token_labels=ids, whole=whole)
                continue
            out.see_document(len(ids))
            for start in range(0, len(ids) - 1, self.max_length - 1):
                piece = ids[start : start + self.max_length]
                out.add(first + i, piece, token_labels=piece)


def encoder_of(record: Mapping[str, Any], tokenizer: Any) -> Instructions | Chats | PlainText:
    """An encoder like the one that left this record, for prompts: it is not meant to cut anything."""
    if record["kind"] == "instructions":
        chat = ChatTemplate(tokenizer) if record["chat_template"] else None
        template = record["prompt_template"]
        if template is not None:
            places_of(template, "run/layout.json: ")
        return Instructions(tokenizer, record["prompt"], record["answer"], 2, True, template, chat)
    if record["kind"] == "chats":
        columns = record["messages"], record["tools"], record["system"]
        return Chats(tokenizer, columns[0], 2, True, ChatTemplate(tokenizer), *columns[1:])
    return PlainText(tokenizer, record["text"], max_length=2)


def every_answer(value: Any) -> list[str]:
    """All right answers of a row: a text, several, or SQuAD's record of texts and offsets."""
    value = read_answer(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        value = value.get("text")
    if isinstance(value, (list, tuple)):
        return [text for part in value for text in every_answer(part)]
    answer = answer_text(value)
    return [] if answer is None else [answer]
