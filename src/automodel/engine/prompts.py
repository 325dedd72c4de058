"""From what a person asks to the text that a language model was trained to answer.

A model answers well only if it is asked in the words of its training: through its chat template, through the run's
`prompt_template` or instruction layout, or, for a model trained on plain text, with the bare text to continue. A run
notes which it was (`run/layout.json`). Runs of earlier releases do not: there the config says it, and where it left
that to the data's columns, the columns are looked at again. Without either (a plain Hugging Face folder), a model with
a chat template is asked through it, and any other continues the text.

Prompts are rendered by the very encoder that wrote the training samples, so they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from automodel.config.errors import UserError
from automodel.data.chat import ChatTemplate
from automodel.data.classify import text_problem
from automodel.data.config import DatasetConfig
from automodel.data.language import ANSWER_ROLES, Chats, Instructions, PlainText, encoder_of
from automodel.data.layouts import Request, choose_layout, is_ready
from automodel.data.prepare import cache_root
from automodel.data.prompt_template import places_of
from automodel.data.python_tokenizers import learned_tokens
from automodel.data.sources import find_source
from automodel.data.special_tokens import special_ids
from automodel.data.tool_calls import BadChat
from automodel.engine.saved import SavedModel
from automodel.tasks.registry import CAUSAL_LM

Prompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A text, chat messages, or a row: columns of the run's prompt, or `messages` with `system` and `tools`."""

ANSWER = "x"  # stands for the answer where the training encoder wants one; it is cut off again


class BadPrompt(Exception):
    """A prompt cannot be used; the message says why."""


@dataclass(frozen=True)
class PromptWriter:
    """Writes prompts for one saved language model."""

    tokenizer: Any
    encoder: Instructions | Chats | PlainText
    system: str | None = None
    """A system message for every chat that has none."""
    notes: tuple[str, ...] = field(default=())

    @property
    def chat(self) -> ChatTemplate | None:
        return None if isinstance(self.encoder, PlainText) else self.encoder.chat

    @property
    def continues(self) -> bool:
        """Whether the model's output continues the prompt, rather than answering it."""
        return isinstance(self.encoder, PlainText)

    @property
    def columns(self) -> dict[str, str]:
        """Role to column of an instruction layout; empty for other models."""
        return dict(self.encoder.prompt) if isinstance(self.encoder, Instructions) else {}

    def has_own_system(self, prompt: Prompt) -> bool:
        """Whether a prompt that can be used brings its own system message, which comes before `system`."""
        if isinstance(prompt, str):
            return False
        if isinstance(prompt, Mapping) and "messages" not in prompt:
            return bool(prompt.get("system", prompt.get(self.columns.get("system", "system"))))
        messages, beside = (prompt["messages"], prompt.get("system")) if isinstance(prompt, Mapping) else (prompt, None)
        return (self.chat or ChatTemplate(self.tokenizer)).turns(messages, beside)[0]["role"] == "system"

    def asked(self) -> list[str]:
        """Roles that a prompt cannot leave empty (Alpaca's `input`, a context and a system message may be)."""
        return [role for role in self.columns if role not in ("input", "context", "system")] or list(self.columns)

    def tokens(self, prompt: Prompt) -> list[int]:
        """What the model reads. Raises `BadPrompt`."""
        try:
            text = self.text(prompt)
        except BadChat as error:
            raise BadPrompt(str(error)) from error
        ids = self._before_an_answer(text, special=not self._is_chat(prompt))
        if not ids:
            raise BadPrompt("the prompt has no tokens")
        return ids

    def _before_an_answer(self, text: str, special: bool) -> list[int]:
        """`special`: with the tokenizer's own special tokens, which a chat template writes itself."""
        if text.endswith(("\n", " ")) and not self.continues:
            # An answer followed in training. GPT-2 has one token for two line breaks, but two where a word follows, and
            # a space behind a chat template's "assistant: " is part of that word.
            start = len(text) if self.chat is None else self.chat.answer_start(text)
            asked = learned_tokens(self.tokenizer, [text + ANSWER], [[(start, len(text + ANSWER))]], special)
            ids, answers = asked[0]
            return ids[: int(answers.argmax())].tolist()
        ids = self.tokenizer(text, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]
        ended = bool(ids) and ids[-1] == self.tokenizer.eos_token_id and not text.endswith(self.tokenizer.eos_token)
        return ids[:-1] if special and ended else ids  # some tokenizers end every text, but the answer is to come

    def text(self, prompt: Prompt) -> str:
        """The prompt as training wrote it, up to where the answer begins."""
        if isinstance(prompt, Mapping) and "messages" in prompt:
            return self._conversation(prompt["messages"], prompt.get("system"), prompt.get("tools"))
        if isinstance(prompt, Mapping):
            return self._instruction(prompt)
        if not isinstance(prompt, str) and prompt is not None:
            return self._conversation(prompt, None, None)
        problem = text_problem(prompt, "prompt")
        if problem:
            raise BadPrompt(problem)
        assert isinstance(prompt, str)
        if isinstance(self.encoder, Instructions):
            return self._instruction(self._as_fields(prompt))
        if isinstance(self.encoder, Chats):
            return self._conversation([{"role": "user", "content": prompt}], None, None)
        return prompt

    def stops(self) -> list[int]:
        """Tokens that end an answer: the tokenizer's, and those the chat template closes a turn with (Phi-3's last one
        has two, and only the first one is in every turn)."""
        stops = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        if self.chat is not None:
            turns = [{"role": "user", "content": ANSWER}, {"role": "assistant", "content": ANSWER}]
            text, spans = self.chat.spans(turns)
            special = special_ids(self.tokenizer)
            for token in reversed(self.tokenizer(text[slice(*spans[-1])], add_special_tokens=False)["input_ids"]):
                if token in special:
                    stops.append(token)
                elif self.tokenizer.decode([token]).strip():
                    break
        return list(dict.fromkeys(stops))

    def _is_chat(self, prompt: Prompt) -> bool:
        has_messages = not isinstance(prompt, str) and ("messages" in prompt or not isinstance(prompt, Mapping))
        return has_messages or self.chat is not None

    def _conversation(self, messages: Any, system: str | None, tools: Any) -> str:
        chat = self.chat or ChatTemplate(self.tokenizer)
        turns, tools = chat.turns(messages, system), chat.tools(tools)
        if turns[-1]["role"] == "assistant":
            turns = turns[:-1]  # its last turn is what is asked for
        if not turns:
            raise BadPrompt("the conversation has nothing but an assistant message")
        if self.system and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": self.system}, *turns]
        if self.chat is None and not self.tokenizer.chat_template:
            raise BadPrompt("the model has no chat template, so it takes text and not messages")
        return chat.whole_text(turns, tools, prompt=True)

    def _instruction(self, row: Mapping[str, Any]) -> str:
        if not isinstance(self.encoder, Instructions):
            raise BadPrompt("the model was not trained on prompts of several columns; give a text or chat messages")
        fields = {role: row.get(role, row.get(column)) for role, column in self.encoder.prompt.items()}
        if self.system and not fields.get("system"):
            fields = {"system": self.system, **fields}
        problem = self.encoder._prompt_problem(fields)
        if problem:
            raise BadPrompt(problem)
        sample = self.encoder._text(0, fields, ANSWER)
        return sample.text[: sample.spans[0][0]]

    def _as_fields(self, text: str) -> dict[str, str]:
        asked = self.asked()
        if len(asked) > 1:
            raise BadPrompt(
                f"the run's prompts are made of {', '.join(self.columns)}, so one text is not enough: give a file with "
                "these columns as --input"
            )
        return {asked[0]: text}


def prompt_writer(saved: SavedModel, *, raw: bool = False, system: str | None = None) -> PromptWriter:
    """How this model is asked. `raw` gives it the bare text instead."""
    tokenizer = saved.tokenizer
    plain = PlainText(tokenizer, "text", max_length=2)
    if raw and system:
        raise UserError("--system is written by the chat template, which --raw leaves out; give one of them.")
    if raw:
        return PromptWriter(tokenizer, plain)
    encoder, notes = _training_encoder(saved)
    if encoder is None:
        encoder = Chats(tokenizer, "messages", 2, True, ChatTemplate(tokenizer)) if tokenizer.chat_template else plain
    if isinstance(encoder, Chats) and not tokenizer.chat_template:
        raise UserError(f"the run was trained on chats, but the tokenizer in '{saved.folder}' has no chat template.")
    writer = PromptWriter(tokenizer, encoder, system, tuple(notes))
    if system and writer.chat is None:
        raise UserError("--system needs a model with a chat template; this one is asked with plain text.")
    return writer


def _training_encoder(saved: SavedModel) -> tuple[Instructions | Chats | PlainText | None, list[str]]:
    """The encoder that wrote the training samples; None where the run does not tell."""
    if saved.layout is not None:
        return encoder_of(saved.layout, saved.tokenizer), []
    if saved.run is None:
        return None, []
    cfg = replace(saved.dataset, chat_template=None)  # the tokenizer was saved with it
    features = _columns_in_config(cfg) or _columns_of_data(cfg)
    if features is None and cfg.text_column:
        return PlainText(saved.tokenizer, cfg.text_column, max_length=2), []
    if features is None:
        how = "through its chat template" if saved.tokenizer.chat_template else "with the bare text"
        return None, [f"the training data is not to be found, so its layout is unknown: the model is asked {how}"]
    if is_ready(cfg, features):
        return None, []
    request = Request(cfg, CAUSAL_LM.rows, saved.tokenizer, max_length=2, token_types=False, section="dataset")
    encoder = choose_layout(SimpleNamespace(features=features), request).encoder
    return (encoder if isinstance(encoder, Instructions | Chats | PlainText) else None), []


def _columns_in_config(cfg: DatasetConfig) -> dict[str, Any] | None:
    """The columns, as far as they decide the layout, where the config names them all."""
    from datasets import List, Value

    text = Value("string")
    if cfg.column_mapping:
        places = places_of(cfg.prompt_template or "")
        return dict.fromkeys([*cfg.column_mapping.values(), *places], text)
    if cfg.messages_column:
        return {cfg.messages_column: List({"role": text, "content": text})}
    if cfg.prompt_template is not None:
        places = places_of(cfg.prompt_template)
        answer = cfg.target_column or next(role for role in ANSWER_ROLES if role not in places)
        return dict.fromkeys([*places, answer], text)
    return None


def _columns_of_data(cfg: DatasetConfig) -> dict[str, Any] | None:
    """The training data's columns, if it still lies where it was."""
    try:
        source = find_source(cfg, role="train", section="dataset", resolved_target=None, memory=cache_root(cfg))
        return source.load().features
    except (UserError, TypeError):  # TypeError: a dataset of the user's own making, which is not called for this
        return None
