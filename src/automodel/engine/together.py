"""The captured step of several ranks that each hold the model (`ddp`): three parts instead of one graph.

    A   forward and backward of this rank's micro-batches, into flat gradients       a CUDA graph for each shape
    B   those gradients and the loss, summed over the ranks                          NCCL, beside the end of A
    C   global norm, clipping, AdamW, learning rate, 16-bit copies                   one CUDA graph

The collectives are no part of a graph, so it does not matter that ranks replay graphs of different shapes, or none: a
rank without documents adds zeros. They are issued in the same order everywhere, piece by piece (`gradient_pieces.py`),
each on a stream of its own as soon as graph A has marked it, so the first are under way while the backward pass makes
the others. Since all ranks see the same sums, part C does the same everywhere, and the weights stay equal to the bit.

The loss is divided by the labels of all ranks, which are counted on the host before graph A: its result is a plain sum.

With one micro-batch a step, gradients are written, in the compute dtype, and products write theirs in place; with
several, they are added up in fp32 (`flat_parameters.py`). The sum over ranks is made in `wire`, fp32 unless the config
says otherwise: 16-bit gradients are widened, summed, and rounded once, as one GPU rounds the sum over all its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from automodel.data.batch import PackedBatch, StepBatch
from automodel.distributed.world import Alone
from automodel.engine.captured import CapturedStep
from automodel.engine.gradient_pieces import GradientPieces
from automodel.engine.step import StepResult
from automodel.kernels.lazy_rows import RING

DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp32": torch.float32, "float32": torch.float32}


def wire_dtype(asked: str | None) -> torch.dtype:
    """What gradients are summed in between ranks; `distributed.reduce_dtype`."""
    return DTYPES[str(asked or "fp32").removeprefix("torch.")]


def seed_offset_of(rank: int) -> int:
    """Dropout of another rank is drawn with another key: seeds that people choose and steps count in the low word."""
    return rank << 32


def own_head(model: Any) -> list[nn.Parameter]:
    """The output layer of a language model, where it is not the word table as well."""
    head, words = model.get_output_embeddings(), model.get_input_embeddings()
    return [] if head is None or head.weight is words.weight else list(head.parameters())


class TogetherStep(CapturedStep):
    """`CapturedStep`, with a sum over the ranks between gradients and update. `blocks`: the layers, in their order."""

    def __init__(self, *args: Any, ranks: Alone, wire: torch.dtype, blocks: Sequence[nn.Module], **kw: Any):
        super().__init__(*args, **kw)
        self.apart = True
        self.ranks, self.wire = ranks, wire
        self.placed = not self.accumulates
        head = own_head(self.model)
        self.pieces = GradientPieces(self.optimizer, blocks, self.side, placed=self.placed, behind=head)
        self.seed_offset = seed_offset_of(ranks.rank)

    def _open_streams(self) -> None:
        super()._open_streams()
        self.wires = torch.cuda.Stream(priority=-1)

    def __call__(self, index: int, batch: StepBatch) -> StepResult:
        if self.unsettled == RING:
            self.settle()
        passes = len(batch.micro_batches)
        own = sum(self.loss.count(b) for b in batch.micro_batches)
        count, tokens, samples, of_all = self.ranks.total([own, batch.num_tokens, batch.num_documents, passes])
        with self.ranks.in_step():
            for micro_batch in batch.micro_batches:
                assert isinstance(micro_batch, PackedBatch)
                self._replay(micro_batch, count or 1.0)
            if not batch.micro_batches:
                self._learn_nothing()
            self._count_passes(passes, int(of_all))
            self._sum(marked=bool(batch.micro_batches))
            self._update()
        self.unsettled += 1  # not before a rehearsal inside the step, which settles
        lr = self.schedule.lr_at(index, self.peak_lr)
        norm = self.optimizer.grad_norm.squeeze(0)
        return StepResult(self.last_loss.clone(), norm, lr, int(tokens), int(samples))

    @property
    def _own_loss(self) -> Tensor:
        return self.loss_sum if self.accumulates else self.last_loss

    def _learn(self, static: Any) -> None:
        with self.pieces.pass_of():
            super()._learn(static)

    def _learn_nothing(self) -> None:
        """This rank has no documents: it adds zeros. What layers put off is done now, since no forward pass does it."""
        if self.late is not None:
            self.optimizer.settle()
        for buffer in self.optimizer.flat.fixed_buffers:
            buffer.zero_()
        self._own_loss.zero_()

    def _count_passes(self, own: int, of_all: int) -> None:
        """An epoch's last step may have a micro-batch less for some ranks. The seeds of all count what the busiest has
        done, which by `data/deal.py` is the mean, rounded up: so the first rank's count, which is saved, is everyone's.
        """
        missing = -(-of_all // self.ranks.size) - own
        if missing:
            self.seed += missing

    def _sum(self, marked: bool) -> None:
        """Over all ranks, on a stream of its own; the main one goes on when everything is there."""
        main = torch.cuda.current_stream()
        with torch.cuda.stream(self.wires):
            pieces = self.pieces.as_they_come(lambda: self.wires.wait_stream(main), marked=marked)
            self.ranks.add_up(pieces, self.wire)
            self.ranks.add_up([self._own_loss])
        main.wait_stream(self.wires)

    def _optimize(self) -> None:
        if self.placed:
            self.optimizer.hand_out()
        super()._optimize()

    def finish(self) -> None:
        super().finish()
        self.pieces.remove()


@dataclass(frozen=True)
class OnHost:
    """A batch where it is; what `StaticBatch` is for a GPU."""

    batch: PackedBatch
    scale: Tensor


class TogetherOnHost(TogetherStep):
    """The same three parts without graphs, on the CPU: the same flat gradients, the same pieces, the same sums. Runs on
    the CPU have faster steps of their own (`step.py`); this one is there to be compared with them."""

    def _open_streams(self) -> None:
        pass

    def _replay(self, batch: PackedBatch, count: float) -> None:
        self._learn(OnHost(batch, torch.tensor([1.0 / count])))
        self._drop_gradients()

    def _sum(self, marked: bool) -> None:
        self.ranks.add_up(self.pieces.as_they_come(lambda: None, marked=marked), self.wire)
        self.ranks.add_up([self._own_loss])

    def _update(self) -> None:
        self._optimize()
        self._drop_gradients()

    def finish(self) -> None:
        self.settle()
        self.pieces.remove()
