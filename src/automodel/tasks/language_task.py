"""What tasks that learn to write text have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel.tasks.loss_config import LossConfig
from automodel.tasks.task import Task

if TYPE_CHECKING:
    from automodel.metrics.compute import Kind
    from automodel.tasks.answers import Answer
    from automodel.tasks.loss import SupervisedLoss


class LanguageTask(Task):
    """Tokens are learned by cross-entropy, and what is measured is how likely they are."""

    verb = "generate"

    def loss(self, cfg: LossConfig, problem_type: str | None, num_labels: int | None) -> SupervisedLoss:
        from automodel.tasks.loss import supervised_loss

        return supervised_loss(cfg, "classes", num_labels, task=self.name, likelihood=True)

    def metrics(self, problem_type: str | None) -> Kind:
        return "tokens"

    @property
    def answer(self) -> type[Answer]:
        from automodel.tasks.answers import Generation

        return Generation
