"""The captured step: forward, backward, clipping, AdamW and the learning rate as one CUDA-graph replay.

At batch 8 of DistilBERT a stock step keeps the GPU busy for a quarter of its time; the rest is Python deciding what to
launch next. Here a step is recorded once for every shape and replayed. Shapes repeat because token counts are rounded
up to buckets. Everything that changes from step to step lies in device memory: the batch in one static buffer, the
learning rate in a table that the optimizer indexes by its own step count, dropout seeds in a counter that the graph
advances. The host copies one small block from pinned memory, launches one graph, and goes on to the next batch; losses
are read when they have come (`log_lines.py`).

With several micro-batches a step, each is a replay that accumulates into gradients at fixed places, and the update is a
graph of its own.

Weights: the optimizer holds fp32 masters and the model computes with bf16 copies that the update writes (`FlatAdamW`),
so there is no autocast and no cast in the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from automodel.data.batch import PackedBatch, StepBatch
from automodel.engine.optimizer_state import AdamWRecord, load_into_flat, record_of_flat
from automodel.engine.recording import hand_back_unused, is_roomy, make_room, ran_out, recording
from automodel.engine.static_batch import Ring, StaticBatch, shape_of
from automodel.engine.step import Forward, Named, StepResult, check_fit, model_tensors, release_memory
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.late_update import LateUpdates
from automodel.kernels.lazy_rows import RING
from automodel.kernels.side_stream import SideStream, hand_on, open_stream
from automodel.models.recompute import forget_pass
from automodel.optim.schedule import Schedule
from automodel.tasks.loss import Loss

ABOVE = -1  # the priority of what a step waits for
MOST_GRAPHS = 256  # past this the shapes do not repeat, and recording costs more than it saves
MOST_FAILURES = 3  # past this no recording is tried any more: it is not the shape
MOST_SHORTAGES = 4  # past this many in a row no recording is tried any more: graphs go before they are worth it
WORTH = 8  # replays that a recording should be good for
MORE_ROOM = "Smaller micro-batches with more accumulation, or gradient checkpointing, leave more room."


@dataclass(frozen=True)
class Uncaptured:
    """Stands in for a graph that could not be recorded: replaying it does the work."""

    work: Callable[[], None]
    tidy: Callable[[], None]

    def replay(self) -> None:
        self.work()
        self.tidy()


class CapturedStep:
    """The step as CUDA graphs, one for each shape."""

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        loss: Loss,
        optimizer: FlatAdamW,
        schedule: Schedule,
        *,
        peak_lr: float,
        seed: Tensor,
        accumulates: bool,
        device: str,
        side: SideStream | None = None,
        compiled: bool = False,
        late: LateUpdates | None = None,
    ):
        self.model, self.forward, self.loss, self.optimizer = model, forward, loss, optimizer
        self.schedule, self.peak_lr, self.seed, self.device = schedule, peak_lr, seed, device
        self.accumulates, self.side, self.compiled, self.late = accumulates, side, compiled, late
        self.apart = accumulates  # whether the update is a graph of its own
        self.seed_offset = 0  # of this rank
        self.rehearsed = False
        self.largest: PackedBatch | None = None
        """The largest batch of the run, where it is known (`fit.py`)."""
        self.failures = 0  # recordings that could not be made
        self.shortages = 0  # recordings, one soon after the other, for which graphs had to make room
        self.replays = 0  # since then
        self.unsettled = 0
        self.loss_sum = torch.zeros((), device=device)
        self.last_loss = torch.zeros((), device=device)
        self.statics: dict[tuple, StaticBatch] = {}
        self.graphs: dict[tuple, torch.cuda.CUDAGraph | Uncaptured] = {}
        self.warn: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
        self._open_streams()

    def _open_streams(self) -> None:
        # Above the second stream: what the step waits for goes first where both want the same processor.
        self.stream = open_stream(ABOVE)
        self.ring = Ring(self.device)
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, index: int, batch: StepBatch) -> StepResult:
        if self.unsettled == RING:
            self.settle()
        count = sum(self.loss.count(b) for b in batch.micro_batches)
        for micro_batch in batch.micro_batches:
            assert isinstance(micro_batch, PackedBatch)
            self._replay(micro_batch, count or 1.0)  # nothing but classes of weight zero teaches nothing
        if self.apart:
            self._update()
        self.unsettled += 1  # now: a rehearsal before the replay settles what the steps before put off, not this one
        lr = self.schedule.lr_at(index, self.peak_lr)
        norm = self.optimizer.grad_norm.squeeze(0)
        return StepResult(self.last_loss.clone(), norm, lr, batch.num_tokens, batch.num_documents)

    def probe(self, batch: PackedBatch, recorded: bool = False) -> None:
        """Forward and backward of a batch, leaving no trace: does it fit? Raises torch's out-of-memory error if not.
        `recorded`: as a graph, too, where memory is short: nobody hands any back while it is recorded."""
        static = StaticBatch(batch, self.device, self.ring)
        static.send(batch, max(1, batch.num_labels))
        hand_back_unused()  # what loading has left: 5.6 GiB beside the 16.1 of Llama 1B
        self._rehearse(static)
        hand_back_unused()
        if recorded and not is_roomy():
            try:
                self._try_recording(static)
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if ran_out(error):
                    raise torch.cuda.OutOfMemoryError(str(error)) from error
                # Otherwise the first step will say why, and run eagerly.
            hand_back_unused()

    def hand_on_streams(self) -> None:
        """To the next step that is made, where this one was only tried."""
        hand_on(self.stream, ABOVE)
        if self.side is not None:
            hand_on(self.side.stream)

    def try_recording(self, batch: PackedBatch) -> None:
        """Records forward and backward of a batch and forgets the graph; raises where they cannot be recorded."""
        self._try_recording(StaticBatch(batch, self.device, self.ring))

    def _try_recording(self, static: StaticBatch) -> None:
        self._recorded(lambda: self._learn(static))
        self.pool = torch.cuda.graph_pool_handle()  # the other went with its only graph: torch would refuse it

    def _replay(self, batch: PackedBatch, count: float) -> None:
        if shape_of(batch) not in self.graphs:
            self._begin_with_the_largest()
        shape, static = self._static_of(batch)
        static.send(batch, count)
        self._play(shape, lambda: self._capture(static))

    def _begin_with_the_largest(self) -> None:
        """Later graphs find their places among those of the first. A larger one would not: recorded in the order in
        which they come, fifteen shapes of Llama 1B with 16k tokens hold 63 GiB instead of 37."""
        if self.largest is None or shape_of(self.largest) in self.graphs:
            return
        shape, static = self._static_of(self.largest)
        static.send(self.largest, max(1, self.largest.num_labels))  # a rehearsal reads it
        self.graphs[shape] = self._capture(static)

    def _static_of(self, batch: PackedBatch) -> tuple[tuple, StaticBatch]:
        shape = shape_of(batch)
        if shape not in self.statics:
            self.statics[shape] = StaticBatch(batch, self.device, self.ring)
        return shape, self.statics[shape]

    def _update(self) -> None:
        self._play(("update",), lambda: self._record(self._optimize))

    def _play(self, key: tuple, record: Callable[[], torch.cuda.CUDAGraph | Uncaptured]) -> None:
        if key not in self.graphs:
            self.graphs[key] = record()
        self.graphs[key].replay()
        self.replays += 1

    def _capture(self, static: StaticBatch) -> torch.cuda.CUDAGraph | Uncaptured:
        """Records the work. Before the first recording it runs once for real, so that every kernel is compiled and
        every workspace allocated; later shapes need nothing new, unless torch.compile finds a reason to compile again,
        which it could not do while recording."""
        if self.compiled or not self.rehearsed:
            self._rehearse(static)
            hand_back_unused()  # recordings have a pool of their own

        def work() -> None:
            self._learn(static)
            if not self.apart:
                self._optimize()

        return self._record(work)

    def _rehearse(self, static: StaticBatch) -> None:
        """Forward and backward that leave no trace: sums, gradients and random states are put back."""
        self.rehearsed = True
        self.settle()  # what was put off must not be done twice
        random_state = torch.cuda.get_rng_state()
        changed = [self.loss_sum, self.last_loss, self.seed, *self.optimizer.gradient_buffers]
        changed += [] if self.loss.tally is None else [self.loss.tally.sums]
        before = [t.clone() for t in changed]
        try:
            with self._on_stream():
                self._learn(static)
                for tensor, value in zip(changed, before):
                    tensor.copy_(value)
                self._drop_gradients()
        except BaseException:
            torch.cuda.synchronize()  # others will get this memory, which may still be written to
            self._forget_pass()
            raise
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.set_rng_state(random_state)

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | Uncaptured:
        """The work as a graph; where it cannot be recorded, the work itself, with a note that says why."""
        if len(self.graphs) >= MOST_GRAPHS or self.failures >= MOST_FAILURES:
            return Uncaptured(work, self._drop_gradients)
        try:
            return self._recorded(work)
        except RuntimeError as error:
            short = isinstance(error, torch.cuda.OutOfMemoryError)
            reason = str(error).partition("\n")[0]
        made_room = self._let_go_of_graphs()  # not before the error, which holds what was recorded, has gone
        if short and made_room:
            self._count_shortage(made_room)
            if made_room > 1:  # the largest by itself left too little for this one
                self._begin_with_the_largest()
            return self._record(work)
        self.failures += 1
        more = "" if self.failures < MOST_FAILURES else " (so do all shapes that are new from here on)"
        self.warn(f"A step could not be captured as a CUDA graph and runs eagerly instead{more}: {reason}")
        return Uncaptured(work, self._drop_gradients)

    def _recorded(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        make_room()
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, self.pool, self.stream):
                work()
        except BaseException:
            self._forget_pass()
            raise
        self.optimizer.finish_capture()
        self._drop_gradients()
        return graph

    def _let_go_of_graphs(self) -> int:
        """Gives up all graphs; they are recorded again when their shapes come. Returns how many there were. Graphs of
        many shapes cut their pool into pieces, up to several times what the largest needs: so they make room for one
        that finds none. Why they cannot stay after other failures, either, `recording.py` says."""
        torch.cuda.synchronize()  # they may still be at work
        before = len(self.graphs)
        self.graphs = {shape: graph for shape, graph in self.graphs.items() if isinstance(graph, Uncaptured)}
        self.optimizer.forget_captures()
        hand_back_unused()
        return before - len(self.graphs)

    def free_unused(self) -> None:
        if self._let_go_of_graphs():
            self.pool = torch.cuda.graph_pool_handle()  # the other went with its last graph
        release_memory()

    def _count_shortage(self, graphs: int) -> None:
        """Recording takes the host as long as an eager step: graphs that go soon after do not pay."""
        first, soon = self.shortages == 0, self.replays < WORTH * graphs
        self.shortages, self.replays = self.shortages + 1 if soon else 1, 0
        if self.shortages > MOST_SHORTAGES:
            self.failures = MOST_FAILURES
            self.warn(
                f"There is too little GPU memory to keep captured steps: all run eagerly from here on. {MORE_ROOM}"
            )
        elif first:
            self.warn(
                f"GPU memory is short: {graphs} captured steps made room for the next, and are captured again when "
                f"their shapes come. {MORE_ROOM}"
            )

    def _forget_pass(self) -> None:
        """What a pass that broke off has left in the hands of others: much memory, and where it was being recorded,
        events that cannot be waited for."""
        self.pool = torch.cuda.graph_pool_handle()
        if self.side is not None:
            self.side.forget()
        if self.late is not None:
            self.late.done = [None] * len(self.late.done)
        forget_pass(self.model)
        self.optimizer.finish_capture()
        self._drop_gradients()

    def _on_stream(self):
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def _learn(self, static: StaticBatch) -> None:
        if self.late is not None:
            self.late.begin()
        outputs, scale = self.forward(static.batch), self.optimizer.loss_scale
        factor = static.scale[0] if scale is None else static.scale[0] * scale
        loss = self.loss.scaled_sum(outputs, static.batch, factor)
        loss.backward()
        if self.side is not None:
            self.side.join()
        loss = loss.detach() if scale is None else loss.detach() / scale
        if self.accumulates:
            self.loss_sum += loss
        else:
            self.last_loss.copy_(loss)
        self.seed += 1

    def _optimize(self) -> None:
        self.optimizer.step()
        if self.accumulates:
            self.last_loss.copy_(self.loss_sum)
            self.loss_sum.zero_()

    def _drop_gradients(self) -> None:
        """Gradients of a graph live in its own memory and are of no use outside; accumulating ones keep their place."""
        if not self.accumulates:
            self.optimizer.zero_grad(set_to_none=True)

    def settle(self) -> None:
        """Does what was put off: rows that no batch has read lately (`lazy_rows.py`), the last update of the layers
        (`late_update.py`)."""
        if self.unsettled:
            self.optimizer.settle()
            self.unsettled = 0

    def compute(self):
        """For evaluation. The model's own weights have the compute dtype."""
        self.settle()
        return nullcontext()

    # What a checkpoint holds.

    def weights(self) -> Named:
        self.settle()
        return {**model_tensors(self.model), **self.optimizer.full_precision_weights(self.model)}

    def state(self) -> tuple[Named, dict[str, Any]]:
        self.settle()
        return record_of_flat(self.optimizer, self.model, int(self.seed) - self.seed_offset).to_disk()

    @torch.no_grad()
    def load_weights(self, tensors: Named, origin: str) -> None:
        own = self.weights()
        check_fit(own, tensors, origin)
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self.optimizer.flat.refresh_copy()

    @torch.no_grad()
    def load_state(self, tensors: Named, values: Mapping[str, Any]) -> None:
        record = AdamWRecord.from_disk(tensors, values)
        load_into_flat(record, self.optimizer, self.model)
        self.unsettled = 0
        if record.dropout_seed is None:  # from a plain step, which has none: at least no draw of a fresh start again
            self.seed += record.steps
        else:
            self.seed.fill_(record.dropout_seed + self.seed_offset)

    def skipped_steps(self) -> int:
        return int(self.optimizer.device_state.skipped)

    def finish(self) -> None:
        self.settle()
        torch.cuda.synchronize()
        self.graphs.clear()
        if self.late is not None:
            self.late.remove()
        weights = self.optimizer.full_precision_weights(self.model)
        for name, parameter in self.model.named_parameters():
            parameter.grad = None
            for name_of_ours in ("lazy_rows", "gradient_place", "gradient_squares"):
                parameter.__dict__.pop(name_of_ours, None)
            if name in weights:
                parameter.data = weights[name]
