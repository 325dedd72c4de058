"""One optimizer step.

Losses of all micro-batches are summed and divided once by the label count of the whole step. What comes back stays
on the device: the loop reads it when it has something to print, never sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from automodel.data.batch import Batch, PackedBatch, StepBatch
from automodel.losses.task_loss import TaskLoss
from automodel.optim.build import set_lr
from automodel.optim.schedule import Schedule

Forward = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class StepResult:
    """What a step gives back; the tensors are 0-dim and live on the device."""

    loss: Tensor
    """Loss of the step: the sum over its labels divided by their number."""
    grad_norm: Tensor
    """Global gradient norm before clipping."""
    lr: float
    tokens: int
    samples: int


def autocast(precision: str, device: str):
    """The compute context of a precision: bf16 and fp16 over fp32 master weights go through autocast."""
    if precision == "bf16":
        return torch.autocast(device, torch.bfloat16)
    if precision == "fp16":
        return torch.autocast(device, torch.float16)
    return nullcontext()


def labels_of(batch: Batch) -> Tensor:
    return batch.labels_R if isinstance(batch, PackedBatch) else batch.labels


class TrainStep:
    """Forward, backward, clip, update. Called with the step's index and its batch."""

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        loss: TaskLoss,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        peak_lr: float,
        max_norm: float | None,
        precision: str,
        device: str,
    ):
        self.forward, self.loss, self.optimizer, self.schedule = forward, loss, optimizer, schedule
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.peak_lr, self.max_norm, self.precision, self.device = peak_lr, max_norm, precision, device
        # fp16 gradients underflow without a scale; every other precision has fp32's exponent range.
        self.scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")

    def __call__(self, index: int, batch: StepBatch) -> StepResult:
        lr = self.schedule.lr_at(index, self.peak_lr)
        set_lr(self.optimizer, lr)
        count = sum(self.loss.count(labels_of(b), b.num_labels) for b in batch.micro_batches)
        losses = [self._micro_step(b, count) for b in batch.micro_batches]
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_norm if self.max_norm else float("inf"))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(torch.stack(losses).sum(), norm.detach(), lr, batch.num_tokens, batch.num_documents)

    def _micro_step(self, batch: Batch, count: float) -> Tensor:
        batch = batch.to(self.device, non_blocking=True)
        with autocast(self.precision, self.device):
            logits = self.forward(batch)
        loss = self.loss.sum(logits, labels_of(batch)) / count
        self.scaler.scale(loss).backward()
        return loss.detach()
