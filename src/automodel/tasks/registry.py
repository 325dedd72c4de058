"""All tasks, by the name that a config says. A new task is a file beside this one and a line here."""

from __future__ import annotations

from typing import Annotated, Literal

from automodel.config.section import AlsoCalled
from automodel.models.task_head import TaskHead
from automodel.tasks.causal_lm import CausalLM
from automodel.tasks.seq2seq import Seq2Seq
from automodel.tasks.task import Task
from automodel.tasks.text_classification import TextClassification
from automodel.tasks.token_classification import TokenClassification

TEXT_CLASSIFICATION = TextClassification()
TOKEN_CLASSIFICATION = TokenClassification()
CAUSAL_LM = CausalLM()
SEQ2SEQ = Seq2Seq()

TASKS: tuple[Task, ...] = (TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION, CAUSAL_LM, SEQ2SEQ)
"""In this order a model's class or a dataset's class is asked which task it is made for."""

ROW_FORMATS = tuple(task.rows for task in TASKS)

TaskName = Annotated[
    Literal["text-classification", "token-classification", "causal-lm", "seq2seq"],
    AlsoCalled(tuple((spelling, task.name) for task in TASKS for spelling in (task.name, *task.spellings))),
]
"""The type of the key `task:`."""


def task_named(name: str) -> Task:
    """The task that a config, a plan or a report names."""
    return next(task for task in TASKS if task.name == name)


def task_with(head: TaskHead) -> Task:
    """The first task that trains this head."""
    return next(task for task in TASKS if task.head == head)
