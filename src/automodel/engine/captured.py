"""The captured step: forward, backward, clipping, AdamW and the learning rate as one CUDA-graph replay.

At batch 8 of DistilBERT a stock step keeps the GPU busy for a quarter of its time; the rest is Python deciding what to
launch next. Here a step is recorded once for every shape and replayed. Shapes repeat because token counts are rounded
up to buckets. Everything that changes from step to step lies in device memory: the batch in one static buffer, the
learning rate in a table that the optimizer indexes by its own step count, dropout seeds in a counter that the graph
advances. The host copies one small block from pinned memory, launches one graph, and goes on to the next batch; losses
are read when a log line is due.

With several micro-batches a step, each is a replay that accumulates into gradients at fixed places, and the update is a
graph of its own.

Weights: the optimizer holds fp32 masters and the model computes with bf16 copies that the update writes (`FlatAdamW`),
so there is no autocast and no cast in the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from automodel.data.batch import PackedBatch, StepBatch
from automodel.engine.optimizer_state import AdamWRecord, load_into_flat, record_of_flat
from automodel.engine.recording import hand_back_unused, make_room, recording
from automodel.engine.step import Forward, Named, StepResult, check_fit, labels_of, model_tensors
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.late_update import LateUpdates
from automodel.kernels.lazy_rows import RING
from automodel.kernels.side_stream import SideStream
from automodel.losses.task_loss import TaskLoss
from automodel.optim.schedule import Schedule

SLOTS = 4  # batches that may be on their way to the device before the host has to wait for one
ALIGNMENT = 16
MOST_GRAPHS = 256  # past this the shapes do not repeat, and recording costs more than it saves
MOST_FAILURES = 3  # past this no recording is tried any more: it is not the shape


@dataclass(frozen=True)
class Field:
    """Where one tensor of a batch stands in the static buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.size].view(self.dtype).view(self.shape)


class Slot:
    """One of the places a batch passes through on its way: pinned memory, then the device."""

    def __init__(self, host: Tensor, device: Tensor):
        self.host, self.device = host, device
        self.arrived, self.taken = torch.cuda.Event(), torch.cuda.Event()


class Ring:
    """The slots that batches of all shapes pass through, in turn. They are made once, and again for a batch twice the
    size of the first: pinning memory takes 30 ms on some hosts, however little it is."""

    def __init__(self, device: str):
        self.device, self.way = device, torch.cuda.Stream()
        self.slots: list[Slot] = []
        self.size = self.turn = 0

    def next(self, size: int) -> Slot:
        """A slot for so many bytes, which the host may fill."""
        if size > self.size:
            host = torch.empty((SLOTS, -(-2 * size // ALIGNMENT) * ALIGNMENT), dtype=torch.uint8, pin_memory=True)
            self.slots = [Slot(*pair) for pair in zip(host, torch.empty_like(host, device=self.device), strict=True)]
            self.size = host.shape[1]  # not before there is memory for it
            self.way.wait_stream(torch.cuda.current_stream())  # whatever lay there before has been read
        slot = self.slots[self.turn]
        self.turn = (self.turn + 1) % SLOTS
        slot.arrived.synchronize()
        return slot


class StaticBatch:
    """One shape's batch at a fixed address, fed through a small ring of slots. Batches cross the bus on a stream of
    their own, beside the step before; what the step waits for is a copy inside the device."""

    def __init__(self, like: PackedBatch, device: str, ring: Ring):
        self.fields: list[Field] = []
        start = 0
        for f in fields(like):
            value = getattr(like, f.name)
            if isinstance(value, Tensor):
                size = value.numel() * value.element_size()
                self.fields.append(Field(f.name, value.dtype, tuple(value.shape), start, size))
                start += -(-size // ALIGNMENT) * ALIGNMENT
        self.divisor = Field("divisor", torch.float32, (1,), start, 4)
        self.size, self.ring = start + ALIGNMENT, ring
        self.buffer = torch.zeros(self.size, dtype=torch.uint8, device=device)
        self.batch = replace(like, **{f.name: f.view(self.buffer) for f in self.fields})
        self.scale = self.divisor.view(self.buffer)

    def send(self, batch: PackedBatch, count: float) -> None:
        """Queues the batch's way to the device; waits only if `SLOTS` earlier ones have not arrived yet."""
        slot = self.ring.next(self.size)
        for f in self.fields:
            f.view(slot.host).copy_(getattr(batch, f.name))
        self.divisor.view(slot.host).fill_(1.0 / count)
        with torch.cuda.stream(self.ring.way):
            slot.taken.wait()
            slot.device[: self.size].copy_(slot.host[: self.size], non_blocking=True)
            slot.arrived.record()
        slot.arrived.wait()
        self.buffer.copy_(slot.device[: self.size])
        slot.taken.record()


def shape_of(batch: PackedBatch) -> tuple:
    """What a captured graph depends on."""
    tensors = ((f.name, getattr(batch, f.name)) for f in fields(batch))
    return tuple((name, tuple(t.shape)) for name, t in tensors if isinstance(t, Tensor))


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
        loss: TaskLoss,
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
        self.failures = 0  # recordings that could not be made
        self.unsettled = 0
        self.loss_sum = torch.zeros((), device=device)
        self.last_loss = torch.zeros((), device=device)
        self.statics: dict[tuple, StaticBatch] = {}
        self.graphs: dict[tuple, torch.cuda.CUDAGraph | Uncaptured] = {}
        self.warn: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
        self._open_streams()

    def _open_streams(self) -> None:
        # Above the second stream: what the step waits for goes first where both want the same processor.
        self.stream = torch.cuda.Stream(priority=-1)
        self.ring = Ring(self.device)
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, index: int, batch: StepBatch) -> StepResult:
        if self.unsettled == RING:
            self.settle()
        count = sum(self.loss.count(labels_of(b), b.num_labels) for b in batch.micro_batches)
        for micro_batch in batch.micro_batches:
            assert isinstance(micro_batch, PackedBatch)
            self._replay(micro_batch, count or 1.0)  # nothing but classes of weight zero teaches nothing
        if self.apart:
            self._update()
        self.unsettled += 1  # now: a rehearsal before the replay settles what the steps before put off, not this one
        lr = self.schedule.lr_at(index, self.peak_lr)
        norm = self.optimizer.grad_norm.squeeze(0)
        return StepResult(self.last_loss.clone(), norm, lr, batch.num_tokens, batch.num_documents)

    def probe(self, batch: PackedBatch) -> None:
        """Forward and backward of a batch, leaving no trace: does it fit? Raises torch's out-of-memory error if not."""
        static = StaticBatch(batch, self.device, self.ring)
        static.send(batch, max(1, batch.num_labels))
        self._rehearse(static)
        hand_back_unused()

    def try_recording(self, batch: PackedBatch) -> None:
        """Records forward and backward of a batch and forgets the graph; raises where they cannot be recorded."""
        static = StaticBatch(batch, self.device, self.ring)
        self._recorded(lambda: self._learn(static))
        self.pool = torch.cuda.graph_pool_handle()  # the other went with its only graph: torch would refuse it

    def _replay(self, batch: PackedBatch, count: float) -> None:
        shape = shape_of(batch)
        if shape not in self.statics:
            self.statics[shape] = StaticBatch(batch, self.device, self.ring)
        static = self.statics[shape]
        static.send(batch, count)
        if shape not in self.graphs:
            self.graphs[shape] = self._capture(static)
        self.graphs[shape].replay()

    def _update(self) -> None:
        key = ("update",)
        if key not in self.graphs:
            self.graphs[key] = self._record(self._optimize)
        self.graphs[key].replay()

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
        before = [t.clone() for t in changed]
        with self._on_stream():
            self._learn(static)
            for tensor, value in zip(changed, before):
                tensor.copy_(value)
            self._drop_gradients()
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.set_rng_state(random_state)

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | Uncaptured:
        """The work as a graph; where it cannot be recorded, the work itself, with a note that says why."""
        if len(self.graphs) >= MOST_GRAPHS or self.failures >= MOST_FAILURES:
            return Uncaptured(work, self._drop_gradients)
        try:
            return self._recorded(work)
        except torch.cuda.OutOfMemoryError:
            if all(isinstance(graph, Uncaptured) for graph in self.graphs.values()):
                raise
        except RuntimeError as error:
            self.failures += 1
            reason = str(error).splitlines()[0]
            more = "" if self.failures < MOST_FAILURES else " (so do all shapes that are new from here on)"
            self.warn(f"A step could not be captured as a CUDA graph and runs eagerly instead{more}: {reason}")
            return Uncaptured(work, self._drop_gradients)
        self._let_go_of_graphs()  # not before the error, which holds what was recorded, has gone
        return self._recorded(work)

    def _recorded(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The work as a graph. Memory that lies unused beside the graphs' pool cannot be handed back while recording,
        so where there was too little, it is handed back now, and the work recorded again."""
        make_room()
        with suppress(torch.cuda.OutOfMemoryError):  # with the error goes what was recorded
            return self._record_once(work)
        hand_back_unused()
        return self._record_once(work)

    def _record_once(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, self.pool, self.stream):
                work()
        except RuntimeError:
            self._forget_recording()
            raise
        self.optimizer.finish_capture()
        self._drop_gradients()
        return graph

    def _let_go_of_graphs(self) -> None:
        """Graphs of many shapes cut their pool into pieces, up to several times what the largest needs. Where the next
        one finds no room they are given up, and recorded again when their shapes come."""
        torch.cuda.synchronize()  # they may still be at work
        self.graphs = {shape: graph for shape, graph in self.graphs.items() if isinstance(graph, Uncaptured)}
        hand_back_unused()

    def _forget_recording(self) -> None:
        """What a recording that failed has left in the hands of others: events of it cannot be waited for."""
        self.pool = torch.cuda.graph_pool_handle()
        if self.side is not None:
            self.side.forget()
        if self.late is not None:
            self.late.done = [None] * len(self.late.done)
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
        loss = self.loss.scaled_sum(outputs, labels_of(static.batch), factor)
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
            for name_of_ours in ("lazy_rows", "gradient_place"):
                parameter.__dict__.pop(name_of_ours, None)
            if name in weights:
                parameter.data = weights[name]
