"""The optimizer step of a sharded model: FSDP2, with tensor and context parallelism where the layout has them.

`Whole` is the one module that is called: model, loss and their glue under one roof, because gathering and releasing
weights hangs on the forward pass of the outermost module, and the loss reads the head's weights too. `ShardedStep` is
the plain step otherwise: the same sums, the same clipping, the same names in its checkpoints, so that a run may go on
on any other layout.

Every rank runs as many micro-batches as any other. Where a rank has no document left, it runs a blank one: a real batch
whose loss is multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from automodel.config.errors import UserError
from automodel.data.batch import Batch, StepBatch
from automodel.distributed.fully_sharded import clip_by_global_norm, reduces, settle
from automodel.distributed.grid import sum_over_all
from automodel.distributed.shards import cut_like, fill
from automodel.engine.optimizer_state import AdamWRecord, is_plain_adamw, load_into_torch
from automodel.engine.step import Forward, Named, StepResult, TrainStep, check_fit, model_tensors
from automodel.engine.step_balance import StepBalance
from automodel.models.head_outputs import Outputs
from automodel.optim.build import set_lr
from automodel.tasks.loss import Loss


@dataclass(frozen=True)
class Loaded:
    """How this rank came by its weights."""

    streamed: bool
    """Whether it read its own part of each tensor, and no more."""
    seconds: float
    host_bytes: int
    """By how much its memory grew."""
    elements: int
    """Numbers it holds."""

    def in_words(self) -> str:
        how = "each rank read its own rows" if self.streamed else "each rank read the model and kept its part"
        grown = f"{max(0, self.host_bytes) / 2**20:,.0f} MiB of host memory"
        return f"Weights: {how} in {self.seconds:.1f} s; this one holds {self.elements:,} numbers and took {grown}"


class Whole(nn.Module):
    """A model with its loss. Called with a batch alone it gives what the model gives; with a scale as well, the loss
    times that scale."""

    def __init__(
        self,
        model: nn.Module,
        call: Forward,
        loss: Loss,
        compute: Callable[[], AbstractContextManager],
        cut: Callable[[Batch], Batch] | None = None,
    ):
        """`cut`: gives this rank's tokens of a batch that is learned from, on the host."""
        super().__init__()
        self.model = model
        self.call, self.loss, self.compute, self.cut = call, loss, compute, cut

    def forward(
        self, batch: Batch, scale: Tensor | None = None, weighed: Callable[[Outputs], Outputs] | None = None
    ) -> Outputs:
        """`weighed`: gives the balance loss of routers its weight in the step."""
        with self.compute():
            outputs = self.call(batch)
        if weighed is not None:
            outputs = weighed(outputs)
        return outputs if scale is None else self.loss.scaled_sum(outputs, batch, scale)


class ShardedStep(TrainStep):
    """Forward, backward, clip, update; each rank its part of every parameter. `blank` makes a batch for a rank that has
    none."""

    def __init__(
        self,
        whole: Whole,
        blank: Callable[[], Batch],
        place: tuple[int, int],
        optimizer: torch.optim.Optimizer,
        *args: Any,
        **kw: Any,
    ):
        """`place`: of this rank in its context and tensor groups, whose ranks have the same documents."""
        super().__init__(whole.model, whole, whole.loss, optimizer, *args, **kw)
        self.whole, self.blank = whole, blank
        self.counts_documents, self.counts_labels = place == (0, 0), place[1] == 0
        self.loaded: Loaded | None = None

    def __call__(self, index: int, batch: StepBatch) -> StepResult:
        with self.ranks.in_step():
            return self._step(index, batch)

    def _step(self, index: int, batch: StepBatch) -> StepResult:
        lr = self.schedule.lr_at(index, self.peak_lr)
        set_lr(self.optimizer, lr)
        own = list(batch.micro_batches)
        count = sum(self.loss.count(b) for b in own)
        count, tokens, samples = self.counted(count, batch)
        count = count or 1.0
        rounds = self.ranks.highest(len(own))
        balance = self.balance_of_step(rounds, count, tokens)
        loss = torch.zeros((), device=self.device)
        for number in range(rounds):
            reduces(self.whole, number == rounds - 1)
            if number < len(own):
                loss += self._micro_step(own[number], count, balance)
            else:
                self._micro_step(self.blank(), count, balance, weight=0.0)
        loss = sum_over_all(loss if self.counts_labels else torch.zeros_like(loss))
        norm = clip_by_global_norm(self.parameters, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm, lr, int(tokens), int(samples))

    def counted(self, count: float, batch: StepBatch) -> list[float]:
        """Labels, tokens and documents of the step, over all ranks."""
        documents = (batch.num_tokens, batch.num_documents) if self.counts_documents else (0, 0)
        return self.ranks.total([count if self.counts_documents else 0, *documents])

    def _micro_step(
        self, batch: Batch, count: float, balance: StepBalance | None = None, weight: float = 1.0
    ) -> Tensor:
        if self.whole.cut is not None:
            batch = self.whole.cut(batch)
        batch = batch.to(self.device, non_blocking=True)
        scale = torch.full((), weight / count, device=self.device)
        weighed = None
        if balance is not None:
            speaks = bool(weight) and self.counts_documents
            weighed = partial(balance.weighed, tokens=batch.num_tokens, speaks=speaks)
        loss = self.whole(batch, scale, weighed)
        loss.backward()
        return loss.detach()

    def weights(self) -> Named:
        settle(self.whole)
        return model_tensors(self.model)

    def state(self) -> tuple[Named, dict[str, Any]]:
        settle(self.whole)
        return super().state()

    def load_weights(self, tensors: Mapping[str, Any], origin: str) -> None:
        own = self.weights()
        check_fit(own, tensors, origin)  # ty: ignore[invalid-argument-type]
        for name, tensor in own.items():
            fill(tensor, lambda slices, name=name: tensors[name][slices])

    def load_state(self, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        settle(self.whole)
        if is_plain_adamw(self.optimizer):
            record = AdamWRecord.from_disk(tensors, values)  # ty: ignore[invalid-argument-type]
            load_into_torch(record, self.optimizer, self.model, self.scaler, place=cut_like)
            self.skipped = record.skipped
            return
        form = values.get("form")
        if form != self._form():
            raise UserError(
                f"The checkpoint holds the state of {form}, but this run's optimizer is {self._form()}. "
                "Resume with the config the run was started with (run/config.yaml)."
            )
        _load_like(self.optimizer, self.model, tensors, values["optimizer"])

    def finish(self) -> None:
        settle(self.whole)


def _load_like(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Any], values: Any) -> None:
    """State of another optimizer: what has the parameter's shape is cut as the parameter is."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for path, value in {**tensors, **values}.items():
        key, name = path.split("/", 1)
        if hasattr(value, "read"):  # on the disk
            value = cut_like(value, parameters[name], value.dtype) if len(value.shape) else value.read()
        elif isinstance(value, Tensor) and value.dim():
            value = cut_like(value, parameters[name], value.dtype)
        optimizer.state[parameters[name]][key] = value
