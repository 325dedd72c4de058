"""How fast many GPUs would be, on paper: measured compute, stated links.

A step of a rank is arithmetic and traffic. Arithmetic is what one GPU was measured to do: model operations a second,
of which a token has 6·N + 6·L·h·s (s tokens of context, half of them seen), and a third more where every layer is
computed again. Traffic is bytes over links, at the share of their stated speed that collectives reach, plus a delay for
each hop:

    shards       weights gathered twice (forward, backward), gradients scattered once: beside the arithmetic
    replicas     a shard's gradients summed over the replicas: beside the backward pass (under `ddp` all but that of
                 the word table, which is complete at its end)
    tensor       four sums of a layer's activations, forward and backward together: nobody can work meanwhile
    context      queries, keys, values and outputs traded, there and back, forward and backward: the same

    step = max(arithmetic, traffic beside it) + traffic nobody can work beside + what the first and last block wait for

Links within a machine and between machines differ by a factor of nine. A group that leaves its machine goes at the
speed of the network, times its members on each machine, each of which has a network card: what one of them receives,
the others get from it over the faster links. Memory is the estimate of `memory.py`. `docs/scaling.md` is made from
this, and says what is assumed; `tests/unit/plan/test_scaling.py` holds it against what others have published.
"""

from __future__ import annotations

from dataclasses import dataclass

from automodel.distributed.layout import Layout
from automodel.optim.kinds import ADAMW
from automodel.plan.memory import GIB, Mode, ModelShape, Setting, estimate


@dataclass(frozen=True)
class Machine:
    """What the GPUs and their links can do."""

    name: str = "H200, 8 in a machine"
    peak: float = 789e12
    """bf16 operations a second of a large product, measured."""
    memory_gib: float = 139.8
    gpus: int = 8
    inside: float = 450e9
    """Bytes a second of one GPU, one way, to its neighbours (NVLink 4, stated)."""
    outside: float = 50e9
    """The same to other machines (400 Gbit/s for each GPU, stated)."""
    reached: float = 0.8
    """Share of the stated speed that large collectives reach."""
    hop_inside: float = 2e-6
    hop_outside: float = 8e-6
    """Seconds that one hop of a ring takes by itself."""


@dataclass(frozen=True)
class Job:
    """A model and what a GPU trains on in a step."""

    name: str
    parameters: int
    shape: ModelShape
    tokens: int
    """Of a micro-batch of one data-parallel rank."""
    context: int
    """Tokens of a document."""
    checkpointing: Mode = "none"
    precision: str = "bf16"
    accumulation: int = 1

    def operations(self) -> float:
        """A token's arithmetic as peers count it: without what is computed again."""
        return 6.0 * self.parameters + 6.0 * self.shape.layers * self.shape.width * self.context

    def work(self) -> float:
        """A token's arithmetic as it is done."""
        again = {"none": 0.0, "selective": 1 / 6, "full": 1 / 3}[self.checkpointing]
        return self.operations() * (1.0 + again)


@dataclass(frozen=True)
class Prediction:
    """A step of every GPU."""

    step_s: float
    arithmetic_s: float
    beside_s: float
    """Traffic that arithmetic can hide."""
    between_s: float
    """Traffic that nothing can hide."""
    tokens_per_s_gpu: float
    gpus: int
    memory_gib: float
    utilisation: float
    """Model operations a second, as a share of the measured peak."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_s_gpu * self.gpus


H200 = Machine()


def predict(job: Job, layout: Layout, efficiency: float, machine: Machine = H200) -> Prediction:
    """`efficiency`: the share of the peak that one GPU reaches by itself, all its kernels together."""
    share = job.tokens * job.accumulation / (layout.cp * layout.tp)  # of the arithmetic
    arithmetic = share * job.work() / (efficiency * machine.peak)
    beside = _shards(job, layout, machine) + _replicas(job, layout, machine) - _table(job, layout, machine)
    between = _tensor(job, layout, machine) + _context(job, layout, machine) + _table(job, layout, machine)
    ends = 2 * _shards(job, layout, machine) / (3 * job.shape.layers)
    step = max(arithmetic, beside) + between + ends
    tokens = job.tokens * job.accumulation / (layout.cp * layout.tp)
    return Prediction(
        step_s=step,
        arithmetic_s=arithmetic,
        beside_s=beside,
        between_s=between,
        tokens_per_s_gpu=tokens / step,
        gpus=layout.size,
        memory_gib=_memory(job, layout),
        utilisation=tokens / step * job.operations() / machine.peak,
    )


def _ring(payload: float, ranks: int, stride: int, machine: Machine) -> float:
    """Seconds in which every rank of a ring sends `payload` · (ranks − 1) / ranks bytes. `stride`: how far apart in
    rank neighbours of the ring are."""
    if ranks == 1:
        return 0.0
    leaves = ranks * stride > machine.gpus
    members = max(1, machine.gpus // stride)
    speed = (min(machine.inside, members * machine.outside) if leaves else machine.inside) * machine.reached
    hop = machine.hop_outside if leaves else machine.hop_inside
    return payload * (ranks - 1) / ranks / speed + (ranks - 1) * hop


def _shards(job: Job, layout: Layout, machine: Machine) -> float:
    """Two gathers of 2 bytes for each micro-batch, one scatter of 4 bytes for each step; block by block."""
    ranks, stride = layout.shards * layout.cp, layout.tp
    block = job.parameters / layout.tp / job.shape.layers
    gather = _ring(2 * block, ranks, stride, machine)
    scatter = _ring(4 * block, ranks, stride, machine)
    return job.shape.layers * (2 * gather * job.accumulation + scatter)


def _replicas(job: Job, layout: Layout, machine: Machine) -> float:
    """A sum is a scatter and a gather. Each rank has its part of the gradients, in fp32."""
    inner = layout.shards * layout.cp * layout.tp
    block = 4 * job.parameters / inner / job.shape.layers
    return job.shape.layers * 2 * _ring(block, layout.replicas, inner, machine)


def _table(job: Job, layout: Layout, machine: Machine) -> float:
    """What captured steps of whole models sum when the backward pass is over (`engine/gradient_pieces.py`)."""
    if layout.fsdp:
        return 0.0
    return job.shape.vocabulary * job.shape.width / job.parameters * _replicas(job, layout, machine)


def _tensor(job: Job, layout: Layout, machine: Machine) -> float:
    tokens = job.tokens / layout.cp
    each = 2 * _ring(2 * tokens * job.shape.width, layout.tp, 1, machine)
    return 4 * job.shape.layers * job.accumulation * each


def _context(job: Job, layout: Layout, machine: Machine) -> float:
    """All-to-all: every rank sends what it does not keep of its own tokens' heads."""
    widths = (2 * job.shape.queries + 2 * job.shape.keys) / layout.tp
    payload = 2 * job.tokens / layout.cp * widths
    return 2 * job.shape.layers * job.accumulation * _ring(payload, layout.cp, layout.tp, machine)


def _memory(job: Job, layout: Layout) -> float:
    """Of a rank. Gradients of micro-batches before the last are whole, in the masters' dtype."""
    parts = layout.shards * layout.cp * layout.tp
    setting = Setting(
        precision=job.precision,
        captured=not layout.fsdp,
        fused=not layout.fsdp,
        kind=ADAMW,
        checkpointing=job.checkpointing,
        tokens=job.tokens // (layout.cp * layout.tp),
        rows=job.tokens // (layout.cp * layout.tp),
        device="cuda",
        stored_logits=False,
        shards=parts,
    )
    total = estimate(job.shape, job.parameters, setting).total
    if job.accumulation > 1:
        total += job.parameters * (2 if job.precision == "bf16-pure" else 4) * (1 / layout.tp - 1 / parts)
    return total / GIB
