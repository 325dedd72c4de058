"""What the assistant says in a conversation whose chat template does not mark it.

`assistant_only_loss` learns answers alone. A template may mark them (`{% generation %}`); most do not. Where they stand
in the text is then found by rendering (`data/chat.py`), as in a run of a YAML file. For families of templates that TRL
has a training form of, answers begin and end where that form has them: the newline behind `<|im_end|>` belongs to the
answer, and Qwen3's reasoning is written in every answer and not in the last alone. With other templates, what is
learned is what a run of a YAML file learns.

`tests/parity/test_sft_answers.py` compares tokens and what is learned of them with TRL's own, family by family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from automodel.config.errors import UserError
from automodel.data.chat import ChatTemplate
from automodel.data.python_tokenizers import learned_tokens
from automodel.data.tool_calls import BadChat


@dataclass(frozen=True)
class TrainingForm:
    """How a family's training form departs from the text and the answers that its template gives."""

    told_by: tuple[str, ...]
    """Texts that the templates of the family have."""
    opening: str
    """What opens an answer."""
    learns_opening: bool = False
    closings: tuple[str, ...] = ()
    """What may stand behind an answer and belongs to it."""
    edits: tuple[tuple[str, str], ...] = ()
    """Changes of the template: what stands there, and what the training form has instead."""
    ends_with_next: bool = False
    """Whether the model says whose turn is next, so that a conversation ends with that."""


THINKS_IN_THE_LAST_ANSWER = (
    ("loop.index0 > ns.last_query_index", "true"),
    ("loop.last or (not loop.last and reasoning_content)", "true"),
)
DROPS_REASONING = ("{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}", "")
CHATML = "<|im_start|>assistant"

FORMS = (
    TrainingForm(("<|start|>assistant<|channel|>",), "<|start|>assistant", True, ("<|end|>", "<|return|>")),
    TrainingForm(("<|start|>", "<|eom|>", "<|eot|>"), "<|start|>assistant", True),
    TrainingForm(("<｜Assistant｜>", "ns.is_first_sp"), "<｜Assistant｜>", True),
    TrainingForm(("<｜Assistant｜>",), "<｜Assistant｜>", True, edits=(DROPS_REASONING,)),
    TrainingForm((CHATML, 'message.role == "assistant" and not message.tool_calls'), CHATML, closings=("\n",)),
    TrainingForm((CHATML, "ns.last_query_index"), f"{CHATML}\n", False, ("\n",), THINKS_IN_THE_LAST_ANSWER),
    TrainingForm((CHATML,), f"{CHATML}\n", closings=("\n",)),
    TrainingForm(("<start_of_turn>model",), "<start_of_turn>model\n", closings=("\n",)),
    TrainingForm(("<|turn>model", "<turn|>"), "", closings=("\n",)),
    TrainingForm(("<|assistant|>", "<|end|>"), "<|assistant|>\n", closings=("\n",)),
    TrainingForm(
        ("[gMASK]<sop>", "<|observation|>"), "", closings=("<|user|>", "<|observation|>", "<|system|>"),
        ends_with_next=True,
    ),
)  # fmt: skip
AS_WRITTEN = TrainingForm((), "")


def form_of(template: str) -> TrainingForm:
    return next((form for form in FORMS if all(text in template for text in form.told_by)), AS_WRITTEN)


@dataclass(frozen=True)
class WithKeywords:
    """A tokenizer whose chat template is given a row's own keywords (`enable_thinking`)."""

    tokenizer: Any
    keywords: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def apply_chat_template(self, *args: Any, **given: Any) -> Any:
        return self.tokenizer.apply_chat_template(*args, **(self.keywords | given))


@dataclass(frozen=True)
class Answers:
    """Conversations as tokens, and which of those are the assistant's, for one row's tools and keywords."""

    tokenizer: Any
    tools: Any
    keywords: dict[str, Any]

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """A conversation up to where an answer begins."""
        chat, _ = self._chat()
        ids, _ = self._encoded(chat.text(messages, self.tools, prompt=True), [])
        return ids

    def __call__(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        chat, form = self._chat()
        try:
            whole, spans = self._found(chat, messages)
        except BadChat as error:
            raise UserError(f"SFTTrainer: assistant_only_loss: {error}.") from error
        if form.ends_with_next and messages[-1]["role"] == "assistant":
            whole += "<|observation|>" if messages[-1].get("tool_calls") else "<|user|>"
        return self._encoded(whole, in_form(form, whole, spans))

    def _chat(self) -> tuple[ChatTemplate, TrainingForm]:
        template = self.tokenizer.get_chat_template(None, self.tools)
        form = form_of(template)
        for there, instead in form.edits:
            template = template.replace(there, instead)
        return ChatTemplate(WithKeywords(self.tokenizer, self.keywords), template), form

    def _found(self, chat: ChatTemplate, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        turns = chat.turns(messages)
        answers = [turn for turn in turns if turn["role"] == "assistant"]
        if not any(str(turn.get("content") or "").strip() or len(turn) > 2 for turn in answers):
            return chat.text(turns, self.tools), []  # nothing is learned: such rows are left out, and counted
        return chat.spans(turns, self.tools)

    def _encoded(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        ((ids, learned),) = learned_tokens(self.tokenizer, [text], [spans], special=False)
        return ids.tolist(), learned.tolist()


def in_form(form: TrainingForm, whole: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The places of answers, moved to where the training form has them."""
    moved: list[tuple[int, int]] = []
    for start, end in spans:
        after = moved[-1][1] if moved else 0
        opened = whole.rfind(form.opening, after, start) if form.opening else -1
        if opened >= 0:
            start = opened if form.learns_opening else opened + len(form.opening)
        closing = next((text for text in form.closings if whole.startswith(text, end)), "")
        moved.append((start, end + len(closing)))
    return moved
