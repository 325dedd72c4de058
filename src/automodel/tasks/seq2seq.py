"""Sequence to sequence: a target text for each source text, by an encoder and a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from automodel.data.keys import OF_SOURCES_AND_TARGETS, ROLES_OF_SOURCES_AND_TARGETS
from automodel.data.row_format import RowFormat
from automodel.models.task_head import TARGET
from automodel.tasks.language_task import LanguageTask

if TYPE_CHECKING:
    from automodel.data.columns import Columns
    from automodel.data.layouts import Layout, Request


def _lay_out(rows: Any, columns: Columns, request: Request) -> Layout:
    from automodel.data.layouts import sources_and_targets

    return sources_and_targets(rows, columns, request)


@dataclass(frozen=True)
class Seq2Seq(LanguageTask):
    name = "seq2seq"
    spellings = ("summarization", "translation", "text2text-generation", "seq-2-seq-lm")
    model_classes = ("ForSeq2SeqLM", "ForConditionalGeneration", "MTModel")
    rows = RowFormat(
        task=name,
        labels="target",
        keys=OF_SOURCES_AND_TARGETS,
        roles=ROLES_OF_SOURCES_AND_TARGETS,
        max_length=512,
        lay_out=_lay_out,
    )
    head = TARGET
