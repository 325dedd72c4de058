"""One pass over held-out data: loss and metrics, with the model put back as it was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from automodel.data.batch import Batch
from automodel.engine.step import Forward, autocast, labels_of
from automodel.losses.task_loss import TaskLoss
from automodel.metrics.compute import EvalAccumulator, EvalMetrics


@dataclass(frozen=True)
class Evaluator:
    """Evaluates `model` on `loader`. The generator's state is not touched: nothing random happens in eval mode."""

    model: nn.Module
    forward: Forward
    loss: TaskLoss
    loader: Iterable[Batch]
    task: str
    problem_type: str | None
    label_names: list[str] | None
    precision: str
    device: str

    def __call__(self) -> EvalMetrics:
        was_training = self.model.training
        self.model.eval()
        accumulator = EvalAccumulator(self.task, self.problem_type, self.label_names)
        try:
            with torch.no_grad():
                for batch in self.loader:
                    count = self.loss.count(labels_of(batch), batch.num_labels)
                    batch = batch.to(self.device, non_blocking=True)
                    with autocast(self.precision, self.device):
                        logits = self.forward(batch)
                    labels = labels_of(batch)
                    accumulator.update(logits.float(), labels, self.loss.sum(logits, labels), count, batch.indices)
        finally:
            self.model.train(was_training)
        return accumulator.result()
