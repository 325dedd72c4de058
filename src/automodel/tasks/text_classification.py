"""Text classification: one class, several classes or numbers for each text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from automodel.data.keys import OF_LABELLED_TEXTS, ROLES_OF_LABELLED_TEXTS
from automodel.data.row_format import RowFormat
from automodel.models.task_head import POOLED
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.task import Task

if TYPE_CHECKING:
    from automodel.data.columns import Columns
    from automodel.data.layouts import Layout, Request
    from automodel.metrics.compute import Kind
    from automodel.tasks.answers import Answer
    from automodel.tasks.loss import Problem, SupervisedLoss


def _lay_out(rows: Any, columns: Columns, request: Request) -> Layout:
    from automodel.data.layouts import labelled_texts

    return labelled_texts(rows, columns, request)


@dataclass(frozen=True)
class TextClassification(Task):
    name = "text-classification"
    spellings = ("sequence-classification", "seq-cls", "sentiment-analysis")
    model_classes = ("ForSequenceClassification",)
    dataset_classes = ("TextClassification",)
    rows = RowFormat(
        task=name,
        labels="document",
        keys=OF_LABELLED_TEXTS,
        roles=ROLES_OF_LABELLED_TEXTS,
        max_length=512,
        lay_out=_lay_out,
    )
    head = POOLED
    verb = "classify"

    def loss(self, cfg: LossConfig, problem_type: str | None, num_labels: int | None) -> SupervisedLoss:
        from automodel.tasks.loss import supervised_loss

        problems: dict[str, Problem] = {"multi_label_classification": "multi_label", "regression": "regression"}
        return supervised_loss(cfg, problems.get(problem_type or "", "classes"), num_labels, task=self.name)

    def metrics(self, problem_type: str | None) -> Kind:
        return cast("Kind", problem_type or "single_label_classification")

    @property
    def answer(self) -> type[Answer]:
        from automodel.tasks.answers import Classification

        return Classification
