"""The loss of each task, as a *sum*, with the count to divide it by kept apart.

A step divides the summed loss of all its micro-batches once, by the number of labels of the whole step. A mean per
micro-batch, averaged again, would weight tokens by the batch they happened to fall into.

Formulas, per label, equal to what transformers computes as a mean over the same batch:

- single label, tokens: cross-entropy, optionally smoothed and class-weighted (the count is then the sum of weights);
- multi-label: binary cross-entropy, averaged over the classes of a document;
- regression: squared error, averaged over the targets of a document.

Slots that only fill up a fixed shape carry IGNORE (integers) or NaN (floats) and contribute nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel.config.errors import UserError
from automodel.losses.config import LossConfig

IGNORE = -100


@dataclass(frozen=True)
class TaskLoss:
    """`sum(logits, labels)` over a micro-batch, and `count(labels, num_labels)` to divide by."""

    problem: str
    """`classes` (cross-entropy), `multi_label` or `regression`."""
    label_smoothing: float = 0.0
    class_weights: Tensor | None = None

    def sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Summed loss in fp32; a 0-dim tensor on the logits' device."""
        logits = logits.float()
        if self.problem == "classes":
            weight = None if self.class_weights is None else self.class_weights.to(logits.device)
            return F.cross_entropy(
                logits.reshape(-1, logits.shape[-1]),
                labels.reshape(-1),
                weight=weight,
                ignore_index=IGNORE,
                label_smoothing=self.label_smoothing,
                reduction="sum",
            )
        targets = labels.float().reshape(logits.shape)
        counts = ~torch.isnan(targets)
        targets = torch.where(counts, targets, 0.0)
        if self.problem == "multi_label":
            losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        else:
            losses = (logits - targets).square()
        return torch.where(counts, losses, 0.0).sum() / logits.shape[-1]

    def count(self, labels: Tensor, num_labels: int) -> float:
        """What the sum is divided by; `labels` still lie on the host here, so this costs no device sync."""
        if self.class_weights is None:
            return num_labels
        return float(self.class_weights[labels[labels != IGNORE]].sum())


def make_loss(cfg: LossConfig, task: str, problem_type: str | None, num_labels: int | None) -> TaskLoss:
    """The loss of a task; raises `UserError` for settings the task cannot use."""
    problem = "classes"
    if task == "text-classification" and problem_type == "multi_label_classification":
        problem = "multi_label"
    elif task == "text-classification" and problem_type == "regression":
        problem = "regression"
    if problem != "classes":
        for key in ("label_smoothing", "class_weights"):
            if getattr(cfg, key):
                raise UserError(
                    f"loss_fn.{key} belongs to cross-entropy, but the labels here are {problem.replace('_', '-')} "
                    f"targets. Remove loss_fn.{key}."
                )
    weights = None
    if cfg.class_weights is not None:
        if num_labels != len(cfg.class_weights):
            raise UserError(
                f"loss_fn.class_weights has {len(cfg.class_weights)} weights, but there are {num_labels} classes. "
                "Give one weight for each class, in the order of the label names."
            )
        if not all(math.isfinite(w) and w >= 0 for w in cfg.class_weights):
            raise UserError(f"loss_fn.class_weights must be finite and not negative; got {list(cfg.class_weights)}.")
        weights = torch.tensor(cfg.class_weights, dtype=torch.float32)
    return TaskLoss(problem, cfg.label_smoothing, weights)
