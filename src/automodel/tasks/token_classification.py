"""Token classification: a tag for each word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from automodel.data.keys import OF_TAGGED_WORDS, ROLES_OF_TAGGED_WORDS
from automodel.data.row_format import RowFormat
from automodel.models.task_head import TOKENS
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.task import Task

if TYPE_CHECKING:
    from automodel.data.columns import Columns
    from automodel.data.layouts import Layout, Request
    from automodel.metrics.compute import Kind
    from automodel.tasks.answers import Answer
    from automodel.tasks.loss import SupervisedLoss


def _lay_out(rows: Any, columns: Columns, request: Request) -> Layout:
    from automodel.data.layouts import tagged_words

    return tagged_words(rows, columns, request)


@dataclass(frozen=True)
class TokenClassification(Task):
    name = "token-classification"
    spellings = ("ner", "token-cls")
    model_classes = ("ForTokenClassification",)
    dataset_classes = ("TokenClassification",)
    rows = RowFormat(
        task=name,
        labels="token",
        keys=OF_TAGGED_WORDS,
        roles=ROLES_OF_TAGGED_WORDS,
        max_length=512,
        lay_out=_lay_out,
    )
    head = TOKENS
    verb = "tag"

    def loss(self, cfg: LossConfig, problem_type: str | None, num_labels: int | None) -> SupervisedLoss:
        from automodel.tasks.loss import supervised_loss

        return supervised_loss(cfg, "classes", num_labels, task=self.name)

    def metrics(self, problem_type: str | None) -> Kind:
        return "tags"

    @property
    def answer(self) -> type[Answer]:
        from automodel.tasks.answers import Tagging

        return Tagging
