"""One pass over held-out data: loss and metrics, with the model put back as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from automodel.data.batch import Batch, PackedBatch, labels_of
from automodel.data.loader import EvalLoader
from automodel.distributed.world import Alone
from automodel.engine.step import Forward
from automodel.metrics.compute import EvalAccumulator, EvalMetrics, Kind
from automodel.tasks.loss import Loss


def document_of_each_label(batch: Batch) -> Tensor | None:
    """Entities must not run from one document into the next: which document each packed label belongs to."""
    if not isinstance(batch, PackedBatch):
        return None
    return torch.bucketize(batch.read_positions_R, batch.cu_seqlens_D[1:], right=True)


@dataclass(frozen=True)
class Share:
    """This rank's part of an evaluation."""

    own: int
    of: int
    counts_documents: bool = True
    """Whether it speaks for its context and tensor groups, which have the same documents."""
    counts_labels: bool = True
    """Whether it speaks for its tensor group, which has the same labels."""
    cut: Callable[[Batch], Batch] | None = None
    """Gives this rank's tokens of a batch, where others have the rest."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates `model` on `loader`. The generator's state is not touched: nothing random happens in eval mode."""

    model: nn.Module
    forward: Forward
    loss: Loss
    loader: Iterable[Batch]
    kind: Kind
    """What is scored."""
    label_names: list[str] | None
    compute: Callable[[], AbstractContextManager]
    """The step's own compute context (autocast, or nothing where the weights have the compute dtype)."""
    device: str
    together: bool = False
    """Whether every rank must run every batch: each holds a part of the model."""
    share: Share | None = None
    """How ranks share the batches, where their sums can be added up: language models."""

    def __call__(self) -> EvalMetrics:
        was_training = self.model.training
        self.model.eval()
        accumulator = EvalAccumulator(self.kind, self.label_names)
        try:
            with torch.no_grad():
                for batch in self.loader:
                    count = self.loss.count(batch)
                    batch = batch.to(self.device, non_blocking=True)
                    with self.compute():
                        outputs = self.forward(batch)
                    labels = labels_of(batch)
                    loss, logits, right = self.loss.scores(outputs, batch)
                    documents = document_of_each_label(batch) if self.kind == "tags" else None
                    accumulator.update(logits, labels, loss, count, batch.indices, documents, right)
        finally:
            self.model.train(was_training)
        return accumulator.result()


def evaluate_for_all(evaluator: Evaluator, ranks: Alone) -> EvalMetrics:
    """The same on every rank: they decide alike what is best and when to stop. Language models are evaluated by all
    ranks, each some of the batches. Otherwise the first rank evaluates and the others wait, or run the same batches
    where the model is sharded."""
    if ranks.size == 1:
        return evaluator()
    if evaluator.share is not None:
        return _shared(evaluator, evaluator.share, ranks)
    if evaluator.together:
        found = evaluator()
        return EvalMetrics(**ranks.told(lambda: asdict(found)))
    return EvalMetrics(**ranks.told(lambda: asdict(evaluator())))


@torch.no_grad()
def _shared(evaluator: Evaluator, share: Share, ranks: Alone) -> EvalMetrics:
    """Sums of all ranks' batches; every rank runs as many as any other."""
    was_training = evaluator.model.training
    evaluator.model.eval()
    accumulator = EvalAccumulator(evaluator.kind, evaluator.label_names)
    assert isinstance(evaluator.loader, EvalLoader)
    loader, mine = evaluator.loader.share(share.own, share.of)
    try:
        for number, whole in enumerate(loader):
            count = evaluator.loss.count(whole) if share.counts_documents else 0
            batch = whole if share.cut is None else share.cut(whole)
            batch = batch.to(evaluator.device, non_blocking=True)
            with evaluator.compute():
                outputs = evaluator.forward(batch)
            loss, logits, right = evaluator.loss.scores(outputs, batch)
            if number >= mine or not share.counts_labels:
                loss, count = loss * 0.0, 0
                logits, right = None, torch.zeros_like(right) if right is not None else torch.zeros_like(loss)
            accumulator.update(logits, labels_of(batch), loss, count, right=right)
    finally:
        evaluator.model.train(was_training)
    accumulator.take_sums(ranks.total(accumulator.sums()))
    return accumulator.result()
