"""The loss of a task, as a *sum*, with the count to divide it by kept apart.

A step divides the summed loss of all its micro-batches once, by the count of the whole step (over all micro-batches and
ranks). A mean per micro-batch, averaged again, would weight tokens by the batch they happened to fall into. The step
asks for the `count` of its batches first, while they lie on the host; then the sum is made already divided
(`scaled_sum`), because a loss over a vocabulary makes its gradients in the forward pass.

`SupervisedLoss` holds labels against outputs. Formulas, per label, equal to what transformers computes as a mean over
the same batch:

- classes of documents and tokens, and words: cross-entropy (`kernels/linear_cross_entropy.py`), optionally smoothed
  and class-weighted (the count is then the sum of weights); with `z_loss`, ζ·(log Σ exp z)² for each label besides,
  which keeps the logits of long runs from drifting;
- multi-label: binary cross-entropy, averaged over the classes of a document;
- regression: squared error, averaged over the targets of a document.

Slots that only fill up a fixed shape carry IGNORE (integers) or NaN (floats) and contribute nothing.

A language model may leave its last product to the loss (`Unprojected`): same numbers, no logits in memory. A mixture of
experts may add the balance loss of its routers (`Balanced`). Alone it counts once for each label of its batch, so that
the mean over them is what transformers gives; a step says how much each of its micro-batches weighs
(`engine/step_balance.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE, Batch, labels_of
from automodel.kernels.linear_cross_entropy import (
    CrossEntropy,
    cross_entropy_sum,
    linear_cross_entropy,
    linear_cross_entropy_scores,
)
from automodel.kernels.token_scores import TokenScores
from automodel.models.head_outputs import Balanced, Outputs, Unprojected
from automodel.tasks.loss_config import LossConfig

Problem = Literal["classes", "multi_label", "regression"]
"""Cross-entropy over classes or words, binary cross-entropy of each class, or squared errors."""


class Scored(NamedTuple):
    """What an evaluation learns from one batch; tensors stay on the device."""

    loss: Tensor
    """Summed over the labels."""
    logits: Tensor | None
    """In fp32, where they were made."""
    right: Tensor | None
    """Labels that have the highest logit, counted where the logits were not made."""


class Loss(Protocol):
    """What a step and an evaluation ask of a loss. It is given the whole batch: labels are a field of it, and a task
    may need others, as the log-probabilities of a frozen reference model."""

    @property
    def tally(self) -> TokenScores | None:
        """Counts entropy and right labels of what is learned, where a trainer logs them."""

    def count(self, batch: Batch) -> float:
        """What the sum is divided by. The batch still lies on the host, so this costs no device sync."""

    def scaled_sum(self, outputs: Outputs, batch: Batch, scale: Tensor) -> Tensor:
        """The summed loss times `scale`, a 0-dim tensor on the same device: one over the count of the step, times
        fp16's loss scale. Call `backward()` on the result itself, and nothing else: without logits, gradients are made
        right here, for an upstream gradient of 1, and that of the head's weight goes straight into `.grad`."""

    def scores(self, outputs: Outputs, batch: Batch, tally: TokenScores | None = None) -> Scored:
        """What an evaluation measures: the summed loss without what is there for learning only (`z_loss`, a language
        model's smoothing, a router's balance). `tally`: counts entropy and right labels besides."""


@dataclass(frozen=True)
class SupervisedLoss:
    """A `Loss` that holds the labels of a batch against what the head gives."""

    problem: Problem
    label_smoothing: float = 0.0
    class_weights: Tensor | None = None
    z_loss: float = 0.0
    likelihood: bool = False
    """Evaluations measure how likely the labels are (perplexity): without smoothing, which is for learning."""
    tally: TokenScores | None = None

    @property
    def plain(self) -> bool:
        """Cross-entropy and nothing else."""
        return self.problem == "classes" and not (self.label_smoothing or self.z_loss) and self.class_weights is None

    def count(self, batch: Batch) -> float:
        if self.class_weights is None:
            return batch.num_labels
        labels = labels_of(batch)
        return float(self.class_weights[labels[labels != IGNORE]].sum())

    def scaled_sum(self, outputs: Outputs, batch: Batch, scale: Tensor) -> Tensor:
        labels = labels_of(batch)
        if isinstance(outputs, Unprojected):
            return self._linear_sum(outputs, labels, scale, backward_follows=True)
        if self.tally is not None:
            logits = outputs.logits if isinstance(outputs, Balanced) else outputs
            self.tally.add_logits(logits.flatten(0, -2), labels.flatten())
        return self.sum(outputs, labels) * scale

    def scores(self, outputs: Outputs, batch: Batch, tally: TokenScores | None = None) -> Scored:
        labels = labels_of(batch)
        outputs = outputs.logits if isinstance(outputs, Balanced) else outputs
        plain = replace(self, z_loss=0.0, label_smoothing=0.0 if self.likelihood else self.label_smoothing)
        if not isinstance(outputs, Unprojected):
            if tally is not None:
                tally.add_logits(outputs.flatten(0, -2), labels.flatten())
            return Scored(plain.sum(outputs, labels), outputs.float(), None)
        loss, right = linear_cross_entropy_scores(
            outputs.hidden_RN,
            outputs.weight_VN,
            labels.reshape(-1),
            bias=outputs.bias_V,
            form=plain._form(outputs),
            tally=tally,
            words=outputs.vocabulary,
        )
        return Scored(loss, None, right)

    def sum(self, outputs: Outputs, labels: Tensor) -> Tensor:
        """Summed loss in fp32; a 0-dim tensor on the outputs' device."""
        if isinstance(outputs, Unprojected):
            return self._linear_sum(outputs, labels, 1.0, backward_follows=False)
        if isinstance(outputs, Balanced):
            weighs = (labels != IGNORE).sum() if outputs.labels is None else outputs.labels
            return self.sum(outputs.logits, labels) + outputs.balance * weighs
        logits = outputs.float()
        if self.problem == "classes":
            weights = None if self.class_weights is None else self.class_weights.to(logits.device)
            form = CrossEntropy(z_loss=self.z_loss, label_smoothing=self.label_smoothing)
            return cross_entropy_sum(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), form, weights)
        targets = labels.float().reshape(logits.shape)
        counts = ~torch.isnan(targets)
        targets = torch.where(counts, targets, 0.0)
        if self.problem == "multi_label":
            losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        else:
            losses = (logits - targets).square()
        return torch.where(counts, losses, 0.0).sum() / logits.shape[-1]

    def _form(self, outputs: Unprojected) -> CrossEntropy:
        assert self.problem == "classes"
        assert self.class_weights is None, "a vocabulary has no class weights"
        return CrossEntropy(outputs.logit_scale, outputs.softcap, self.z_loss, self.label_smoothing)

    def _linear_sum(
        self, outputs: Unprojected, labels: Tensor, scale: Tensor | float, backward_follows: bool
    ) -> Tensor:
        return linear_cross_entropy(
            outputs.hidden_RN,
            outputs.weight_VN,
            labels.reshape(-1),
            scale=scale,
            bias=outputs.bias_V,
            form=self._form(outputs),
            unit_upstream=backward_follows,
            into_grad=backward_follows and outputs.vocabulary is None,
            tally=self.tally if backward_follows else None,
            words=outputs.vocabulary,
        )


def supervised_loss(
    cfg: LossConfig, problem: Problem, num_labels: int | None, *, task: str, likelihood: bool = False
) -> SupervisedLoss:
    """The loss of a problem; raises `UserError` for settings it cannot use. `num_labels`: classes of the data; none
    where the words of a vocabulary are learned. `task`: its name, for messages."""
    if problem != "classes":
        for key in ("label_smoothing", "class_weights", "z_loss"):
            if getattr(cfg, key):
                raise UserError(
                    f"loss_fn.{key} belongs to cross-entropy, but the labels here are {problem.replace('_', '-')} "
                    f"targets. Remove loss_fn.{key}."
                )
    weights = None
    if cfg.class_weights is not None:
        if cfg.z_loss:
            raise UserError(
                "loss_fn.z_loss is added once for each label, and loss_fn.class_weights give labels different weights; "
                "what both together mean is not settled. Keep one."
            )
        if num_labels is None:
            raise UserError(f"loss_fn.class_weights belongs to classification, and this is {task}. Remove it.")
        if num_labels != len(cfg.class_weights):
            raise UserError(
                f"loss_fn.class_weights has {len(cfg.class_weights)} weights, but there are {num_labels} classes. "
                "Give one weight for each class, in the order of the label names."
            )
        if not all(math.isfinite(w) and w >= 0 for w in cfg.class_weights):
            raise UserError(f"loss_fn.class_weights must be finite and not negative; got {list(cfg.class_weights)}.")
        weights = torch.tensor(cfg.class_weights, dtype=torch.float32)
    return SupervisedLoss(problem, cfg.label_smoothing, weights, cfg.z_loss, likelihood)
