"""What a task is: the questions that the rooms above ask it.

A task is one file beside this one. Rooms below never see it: data gets its row format, models its head, metrics the
kind of its scores, adapters PEFT's name of its head. So nothing outside `tasks/` compares a task's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from automodel.data.row_format import RowFormat
from automodel.models.task_head import TaskHead
from automodel.tasks.loss_config import LossConfig

if TYPE_CHECKING:
    from automodel.metrics.compute import Kind
    from automodel.tasks.answers import Answer
    from automodel.tasks.loss import SupervisedLoss

Verb = Literal["classify", "tag", "generate"]


@dataclass(frozen=True)
class Task(ABC):
    """What is learned, and what of it the other rooms have to know. Two tasks are equal where they are of one class."""

    name: ClassVar[str]
    """What `task:` in a config says."""
    spellings: ClassVar[tuple[str, ...]] = ()
    """What other libraries call it, where the most similar name would be another task's."""
    model_classes: ClassVar[tuple[str, ...]]
    """Parts of names of model classes that are made for it."""
    dataset_classes: ClassVar[tuple[str, ...]] = ()
    """Parts of names of dataset classes whose rows are for it."""
    rows: ClassVar[RowFormat]
    """What its rows are, and where their labels stand."""
    head: ClassVar[TaskHead]
    """Which head it trains."""
    verb: ClassVar[Verb]
    """How a model of this task is asked: the method of `Predictor`."""
    example: ClassVar[str] = "A text of yours."
    """What to ask the trained model, in the command that a run prints at its end."""

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def loss(self, cfg: LossConfig, problem_type: str | None, num_labels: int | None) -> SupervisedLoss:
        """The loss that is learned. Raises `UserError` for settings that the task cannot use. `problem_type`: of the
        labels of documents. `num_labels`: classes of the data; none where tokens are learned."""

    @abstractmethod
    def metrics(self, problem_type: str | None) -> Kind:
        """What an evaluation scores."""

    @property
    @abstractmethod
    def answer(self) -> type[Answer]:
        """What a trained model answers; its fields are the columns that a prediction adds to a table."""
