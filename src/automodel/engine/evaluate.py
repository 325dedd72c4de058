"""One pass over held-out data: loss and metrics, with the model put back as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from automodel.data.batch import Batch, PackedBatch
from automodel.distributed.world import Alone
from automodel.engine.step import Forward, labels_of
from automodel.losses.task_loss import TaskLoss
from automodel.metrics.compute import EvalAccumulator, EvalMetrics


def document_of_each_label(batch: Batch) -> Tensor | None:
    """Entities must not run from one document into the next: which document each packed label belongs to."""
    if not isinstance(batch, PackedBatch):
        return None
    return torch.bucketize(batch.read_positions_R, batch.cu_seqlens_D[1:], right=True)


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
    compute: Callable[[], AbstractContextManager]
    """The step's own compute context (autocast, or nothing where the weights have the compute dtype)."""
    device: str
    together: bool = False
    """Whether every rank must run every batch: each holds a part of the model."""

    def __call__(self) -> EvalMetrics:
        was_training = self.model.training
        self.model.eval()
        accumulator = EvalAccumulator(self.task, self.problem_type, self.label_names)
        try:
            with torch.no_grad():
                for batch in self.loader:
                    count = self.loss.count(labels_of(batch), batch.num_labels)
                    batch = batch.to(self.device, non_blocking=True)
                    with self.compute():
                        outputs = self.forward(batch)
                    labels = labels_of(batch)
                    loss, logits, right = self.loss.scores(outputs, labels)
                    documents = document_of_each_label(batch) if self.task == "token-classification" else None
                    accumulator.update(logits, labels, loss, count, batch.indices, documents, right)
        finally:
            self.model.train(was_training)
        return accumulator.result()


def evaluate_for_all(evaluator: Evaluator, ranks: Alone) -> EvalMetrics:
    """What the first rank finds, on every rank: they decide alike what is best and when to stop. The others wait, or
    run the same batches where the model is sharded; the sums are those of one process."""
    if ranks.size == 1:
        return evaluator()
    if evaluator.together:
        found = evaluator()
        return EvalMetrics(**ranks.told(lambda: asdict(found)))
    return EvalMetrics(**ranks.told(lambda: asdict(evaluator())))
