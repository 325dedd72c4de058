"""The predictions of `docs/scaling.md`: three models on 8, 64 and 1024 GPUs, and the figures they are checked with.

python -m automodel.plan.scaling_table      # prints the tables as they stand in the page
"""

from __future__ import annotations

from dataclasses import replace

from automodel.distributed.layout import Layout
from automodel.plan.memory import ModelShape
from automodel.plan.scaling import H200, Job, Machine, Prediction, predict

MEASURED = 61_240
"""Tokens a second of `llama1b-4k` on one H200 by the captured, fused steps of several ranks, gradients summed by a real
NCCL group of one (`step_probe.py llama1b-4k --together`). One rank alone does 63.0k."""
EAGER = 55_816
"""The same by the sharded step, eager and with fused blocks (row `llama1b-4k-fsdp2-sharded`)."""
STOCK = 41_962
"""The same with stock blocks, which cut matrices have."""


def _llama(layers: int, width: int, heads: int, inner: int, tied: bool, head: int = 128) -> ModelShape:
    return ModelShape(
        layers=layers, width=width, queries=heads * head, keys=8 * head, heads=heads, inner=inner, vocabulary=128_256,
        tied=tied, rms=True, gated=True,
    )  # fmt: skip


LLAMA_1B = Job("Llama-3.2-1B", 1_235_814_400, _llama(16, 2048, 32, 8192, True, 64), 8192, 4096)
LLAMA_8B = Job("Llama-3.1-8B", 8_030_261_248, _llama(32, 4096, 32, 14336, False), 8192, 4096)
LLAMA_70B = Job("Llama-3.1-70B", 70_553_706_496, _llama(80, 8192, 64, 28672, False), 8192, 4096, checkpointing="full")

LAYOUTS: tuple[tuple[Job, int, Layout], ...] = (
    (LLAMA_1B, 8, Layout(replicas=8)),
    (LLAMA_1B, 64, Layout(replicas=64)),
    (LLAMA_1B, 8, Layout(shards=8, fsdp=True)),
    (LLAMA_1B, 64, Layout(8, 8, fsdp=True)),
    (LLAMA_1B, 1024, Layout(128, 8, fsdp=True)),
    (LLAMA_8B, 8, Layout(shards=8, fsdp=True)),
    (LLAMA_8B, 64, Layout(8, 8, fsdp=True)),
    (LLAMA_8B, 64, Layout(shards=64, fsdp=True)),
    (LLAMA_8B, 1024, Layout(128, 8, fsdp=True)),
    (LLAMA_8B, 1024, Layout(shards=1024, fsdp=True)),
    (replace(LLAMA_70B, precision="bf16-pure"), 8, Layout(shards=8, fsdp=True)),
    (LLAMA_70B, 64, Layout(shards=64, fsdp=True)),
    (LLAMA_70B, 64, Layout(shards=8, tp=8, fsdp=True)),
    (LLAMA_70B, 1024, Layout(16, 64, fsdp=True)),
    (LLAMA_70B, 1024, Layout(32, 4, tp=8, fsdp=True)),
)


def efficiency(tokens_per_s: float, machine: Machine = H200) -> float:
    """The share of the peak that a measured run of `llama1b-4k` on one GPU reached."""
    return tokens_per_s * LLAMA_1B.operations() / machine.peak


def rows() -> list[tuple[Job, Layout, Prediction, Prediction]]:
    """Job and layout, as today's ranks would run them at least (captured under `ddp`, eager in shards), and as fast as
    one GPU with captured steps."""
    made = []
    for job, gpus, layout in LAYOUTS:
        assert layout.size == gpus
        sharded = STOCK if layout.tp > 1 else EAGER
        now = efficiency(sharded if layout.fsdp else MEASURED)
        made.append((job, layout, predict(job, layout, now), predict(job, layout, efficiency(MEASURED))))
    return made


def markdown() -> str:
    """The table of the page."""
    head = ("model", "GPUs", "layout", "tok/s a GPU, at least", "all together", "tok/s a GPU, as one was measured",
            "of the peak", "step", "traffic", "GiB a GPU")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for job, layout, now, fused in rows():
        precision = ", pure bf16" if job.precision == "bf16-pure" else ""
        cells = (
            f"{job.name}{precision}",
            f"{layout.size}",
            layout.in_words().removeprefix("fsdp2, "),
            f"{now.tokens_per_s_gpu:,.0f}",
            _short(now.tokens_per_s),
            f"{fused.tokens_per_s_gpu:,.0f}",
            f"{fused.utilisation:.0%}",
            f"{1e3 * now.step_s:,.0f} ms",
            f"{1e3 * (now.beside_s + now.between_s):,.0f} ms",
            f"{now.memory_gib:,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _short(number: float) -> str:
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"


if __name__ == "__main__":
    print(markdown())
