"""Causal language modelling: the next token of plain text, of chats, or of the answers to prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from automodel.data.keys import OF_LANGUAGE
from automodel.data.row_format import RowFormat
from automodel.models.task_head import NEXT_TOKEN
from automodel.tasks.language_task import LanguageTask

if TYPE_CHECKING:
    from automodel.data.columns import Columns
    from automodel.data.layouts import Layout, Request


def _lay_out(rows: Any, columns: Columns, request: Request) -> Layout:
    from automodel.data.layouts import language

    return language(rows, columns, request)


@dataclass(frozen=True)
class CausalLM(LanguageTask):
    name = "causal-lm"
    spellings = ("text-generation", "language-modeling", "clm", "sft")
    model_classes = ("ForCausalLM", "LMHeadModel")
    dataset_classes = ("squad", "Instruction", "Chat")
    rows = RowFormat(task=name, labels="next_token", keys=OF_LANGUAGE, max_length=2048, lay_out=_lay_out)
    head = NEXT_TOKEN
    example = "A question or the beginning of a text."
