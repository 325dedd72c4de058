"""One optimizer step.

Losses of all micro-batches are summed and divided once by the label count of the whole step. What comes back stays
on the device: the loop reads it when it has something to print, never sooner.

`TrainStep` is the plain form, and the truth that `CapturedStep` (captured.py) is compared with. Both answer the same
questions, so nobody else needs to know which one runs: what must a checkpoint hold, how is it put back, and where are
the finished weights.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from automodel.adapters.attach import adapter_of, trained_tensors
from automodel.config.errors import UserError
from automodel.data.batch import Batch, StepBatch
from automodel.distributed.world import ALONE, Alone
from automodel.engine.optimizer_state import (
    VERSION,
    AdamWRecord,
    is_plain_adamw,
    load_into_torch,
    record_of_torch,
)
from automodel.engine.step_balance import StepBalance
from automodel.engine.used_rows import AllRows
from automodel.models.head_outputs import Outputs
from automodel.models.recompute import forget_pass
from automodel.models.router import router_of
from automodel.optim.build import load_state_tensors, set_lr, state_tensors
from automodel.optim.schedule import Schedule
from automodel.tasks.loss import Loss

Forward = Callable[[Batch], Outputs]
Named = dict[str, Tensor]


@dataclass(frozen=True)
class StepResult:
    """What a step gives back; the tensors are 0-dim and live on the device."""

    loss: Tensor
    """Loss of the step: the sum over its labels divided by their number."""
    grad_norm: Tensor
    """Global gradient norm before clipping; valid until the next step."""
    lr: float
    tokens: int
    samples: int


class Step(Protocol):
    """What the loop, the checkpoints and the export ask of a step."""

    forward: Forward
    warn: Callable[[str], None]

    def __call__(self, index: int, batch: StepBatch) -> StepResult: ...

    def compute(self) -> AbstractContextManager:
        """The context that `forward` runs in."""

    def weights(self) -> Named:
        """Every tensor that makes up the model, at full precision; tied ones once."""

    def state(self) -> tuple[Named, dict[str, Any]]:
        """Optimizer state and whatever else must survive a restart, as tensors and as JSON."""

    def load_weights(self, tensors: Named, origin: str) -> None:
        """Puts weights back, exactly; `origin` names them in errors."""

    def load_state(self, tensors: Named, values: Mapping[str, Any]) -> None: ...

    def skipped_steps(self) -> int:
        """Steps that changed nothing because fp16 gradients overflowed; waits for the device."""

    def free_unused(self) -> None:
        """Gives back all memory that is of no use between steps."""

    def finish(self) -> None:
        """Leaves the full-precision weights in the model. No step may follow."""


def autocast(precision: str, device: str):
    """The compute context of a precision: bf16 and fp16 over fp32 master weights go through autocast."""
    if precision == "bf16":
        return torch.autocast(device, torch.bfloat16)
    if precision == "fp16":
        return torch.autocast(device, torch.float16)
    return nullcontext()


@contextmanager
def fp32_products(tf32: bool) -> Generator[None]:
    """Products of fp32 matrices in TF32 or in full precision. Torch has one switch for the whole process, so it is set
    for one run and put back: the next run of the same process may have asked for something else."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def release_memory() -> None:
    """What nobody holds any more goes back to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()


def clip(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """The norm of all gradients, which are made shorter where it is above `max_norm`. As torch does it, but for one
    thing: gradients that are short enough are not multiplied by one. To know it, a GPU would have to be waited for."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    short_enough = norm.device.type == "cpu" and bool(norm + 1e-6 < max_norm)  # torch's own margin; NaN is not short
    if not short_enough:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def model_tensors(model: nn.Module) -> Named:
    """Parameters and saved buffers of a model, tied ones once. Under an adapter, what it trains: the frozen base is the
    folder that the config names."""
    if adapter_of(model) is not None:
        return trained_tensors(model)
    named: Named = dict(model.named_parameters())
    kept = model.state_dict().keys()
    named.update({n: b for n, b in model.named_buffers() if n in kept})
    return named


def check_fit(own: Named, tensors: Named, origin: str) -> None:
    """Refuses weights whose names or shapes are not the model's."""
    wrong = [n for n in own if n not in tensors or tensors[n].shape != own[n].shape]
    wrong += [n for n in tensors if n not in own]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(
            f"{origin} does not fit this model: '{wrong[0]}'{more} differ. "
            "Resume with the config the run was started with (run/config.yaml)."
        )


class TrainStep:
    """Forward, backward, clip, update. Called with the step's index and its batch."""

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        peak_lr: float,
        max_norm: float | None,
        precision: str,
        device: str,
        rows: AllRows | None = None,
        ranks: Alone = ALONE,
        wire: torch.dtype | None = None,
    ):
        """`wire`: what ranks sum gradients in; none: the gradients' own dtype."""
        self.model, self.forward, self.loss = model, forward, loss
        self.optimizer, self.schedule = optimizer, schedule
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.peak_lr, self.max_norm, self.precision, self.device = peak_lr, max_norm, precision, device
        # fp16 gradients underflow without a scale; every other precision has fp32's exponent range.
        self.scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
        self.skipped = 0
        self.updated = False
        self.rows = rows or AllRows()
        self.ranks, self.wire = ranks, wire
        router = router_of(model)
        self.expert_loads = () if router is None else router.sizes
        """Experts of each load that the balance loss of routers is made of."""
        self.warn: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
        self.short_of_memory = False
        """Whether some step found no memory at first, which is said once."""
        self.most_bytes = 0
        """Of GPU memory that the largest batch needs at once, where that was tried (`fit.py`)."""

    def __call__(self, index: int, batch: StepBatch) -> StepResult:
        lr = self.set_rate(index)
        count = sum(self.loss.count(b) for b in batch.micro_batches)
        # Over all ranks: the loss is divided by the labels of the whole step, whoever has them.
        count, tokens, samples = self.ranks.total([count, batch.num_tokens, batch.num_documents])
        count = count or 1.0  # nothing but classes of weight zero teaches nothing
        with self.ranks.in_step():
            losses = self._losses_of(batch, count, tokens)
        own = torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)  # a rank without documents
        loss = self.ranks.sum_gradients(self.parameters, own, self.wire)
        self.scaler.unscale_(self.optimizer)
        norm = clip(self.parameters, self.max_norm if self.max_norm else float("inf"))
        scale = self.scaler.get_scale()
        if self.device == "cuda" and not self.updated:
            # States stay for the whole run: made in pieces of what activations have left, they would be in their way.
            torch.cuda.empty_cache()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        skipped = self.scaler.get_scale() < scale
        self.skipped += skipped
        self.updated |= not skipped
        self.rows.stepped()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm.detach(), lr, int(tokens), int(samples))

    def set_rate(self, index: int) -> float:
        """The learning rate of a step, set and returned."""
        lr = self.schedule.lr_at(index, self.peak_lr)
        set_lr(self.optimizer, lr)
        return lr

    def _losses_of(self, batch: StepBatch, count: float, tokens: float) -> list[Tensor]:
        """Forward and backward of all micro-batches. Where memory is short because it lies in pieces, they are begun
        once more in one piece: what is free goes back to the GPU. Not among ranks, which would wait for each other."""
        try:
            return self._micro_steps(batch, count, tokens)
        except torch.OutOfMemoryError:
            if self.ranks.together:
                raise
        # Only here is the error gone, and with it the frames that hold on to activations.
        if not self.short_of_memory:
            self.short_of_memory = True
            self.warn(
                "GPU memory is short: a step was begun again after all that was free went back. Where that happens "
                "often, a smaller dataloader.batch_size (with step_scheduler.grad_acc_steps) is faster."
            )
        if self.device == "cuda":
            torch.cuda.synchronize()  # copies to and from the host may still be under way
        self.optimizer.zero_grad(set_to_none=True)
        forget_pass(self.model)
        self.free_unused()
        return self._micro_steps(batch, count, tokens)

    def free_unused(self) -> None:
        release_memory()

    def _micro_steps(self, batch: StepBatch, count: float, tokens: float) -> list[Tensor]:
        losses = []
        balance = self.balance_of_step(len(batch.micro_batches), count, tokens)
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            if number == len(batch.micro_batches):
                self.ranks.last_micro_batch(self.parameters, self.wire)
            losses.append(self._micro_step(micro_batch, count, balance))
        balance.finish()  # of a rank without documents
        return losses

    def balance_of_step(self, own: int, count: float, tokens: float) -> StepBalance:
        """What weighs the balance losses of a step with so many micro-batches of this rank. `count`, `tokens`: labels
        and tokens of the whole step."""
        return StepBalance(self.expert_loads, self.ranks, own, labels=count, tokens=tokens, device=self.device)

    def probe(self, batch: Batch) -> None:
        """Forward and backward of a batch, leaving no gradients: does it work?"""
        self._micro_step(batch, max(1, batch.num_labels))
        self.optimizer.zero_grad(set_to_none=True)
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _micro_step(self, batch: Batch, count: float, balance: StepBalance | None = None) -> Tensor:
        batch = batch.to(self.device, non_blocking=True)
        with self.compute():
            outputs = self.forward(batch)
        if balance is not None:
            outputs = balance.weighed(outputs, batch.num_tokens)
        # The loss scale goes in with the rest: gradients that are made with the loss must not underflow either.
        scale = self.scaler.scale(torch.ones((), device=self.device))
        loss = self.loss.scaled_sum(outputs, batch, scale / count)
        loss.backward()
        return loss.detach() / scale

    def compute(self):
        return autocast(self.precision, self.device)

    def weights(self) -> Named:
        return self.rows.whole_weights(model_tensors(self.model))

    def state(self) -> tuple[Named, dict[str, Any]]:
        if is_plain_adamw(self.optimizer):
            record = record_of_torch(self.optimizer, self.model, self.scaler, self.skipped)
            return self.rows.whole_record(record).to_disk()
        tensors, values = state_tensors(self.optimizer, self.model)
        return tensors, {
            "version": VERSION,
            "form": self._form(),
            "optimizer": values,
            "scaler": self.scaler.state_dict(),
            "skipped": self.skipped,
        }

    def _form(self) -> str:
        kind = type(self.optimizer)
        return f"{kind.__module__}.{kind.__qualname__}"

    @torch.no_grad()
    def load_weights(self, tensors: Named, origin: str) -> None:
        check_fit(self.weights(), tensors, origin)
        tensors = self.rows.cut_weights(tensors)
        for name, tensor in model_tensors(self.model).items():
            tensor.copy_(tensors[name])

    def load_state(self, tensors: Named, values: Mapping[str, Any]) -> None:
        if is_plain_adamw(self.optimizer):
            record = self.rows.cut_record(AdamWRecord.from_disk(tensors, values))
            load_into_torch(record, self.optimizer, self.model, self.scaler)
            self.skipped = record.skipped
            return
        form = values.get("form", self._form())  # version 1 did not name it
        if form != self._form():
            raise UserError(
                f"The checkpoint holds the state of {form}, but this run's optimizer is {self._form()}. "
                "Resume with the config the run was started with (run/config.yaml)."
            )
        load_state_tensors(self.optimizer, self.model, tensors, values["optimizer"])
        self.scaler.load_state_dict(values["scaler"])
        self.skipped = values.get("skipped", 0)

    def skipped_steps(self) -> int:
        return self.skipped

    def finish(self) -> None:
        self.rows.restore()
        self.rows = AllRows()
