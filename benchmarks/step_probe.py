"""Where the time of a captured step goes: `python benchmarks/step_probe.py [distilbert-b8 …]` on a GPU.

Random weights, lengths of the named workload. Prints ms per step (steady state), first-epoch time with captures, peak
memory, and the kernels of one replay by total time.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

TASK = "text-classification"
ROWS = 1000
PROFILED = 20  # steps

WORKLOADS = {
    "distilbert-b8": ("distilbert", 8, (5.4, 0.55, 16, 512)),
    "distilbert-b32": ("distilbert", 32, (5.4, 0.55, 16, 512)),
    "bert-base-b32": ("bert", 32, (5.4, 0.55, 16, 512)),
    "modernbert-base-b16": ("modernbert", 16, (6.2, 0.6, 64, 2048)),
    "qwen3-cls-b16": ("qwen3-0.6b", 16, (5.4, 0.55, 16, 512)),
}
"""Model, batch, and (mu, sigma, shortest, longest) of the lengths. All of them classify texts. Language models
(`llama1b-squad-b8`) need token labels in the store, `task="causal-lm"`, and no embedding that is updated row by row."""


def make_model(kind: str):
    import transformers as t

    if kind == "distilbert":
        return t.DistilBertForSequenceClassification(t.DistilBertConfig(num_labels=2))
    if kind == "bert":
        return t.BertForSequenceClassification(t.BertConfig(num_labels=2))
    if kind == "qwen3-0.6b":
        config = t.Qwen3Config(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, vocab_size=151_936, num_labels=2, pad_token_id=None,
        )  # fmt: skip
        return t.Qwen3ForSequenceClassification(config)
    return t.ModernBertForSequenceClassification(t.ModernBertConfig(num_labels=2))


@dataclass
class Probe:
    """A captured step and an epoch of batches for it."""

    step: Any
    batches: list[Any]
    fused: int
    bucket: int

    def epoch(self) -> tuple[float, list[torch.Tensor]]:
        """Seconds and losses of one pass over the batches."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses = [self.step(i, b).loss for i, b in enumerate(self.batches)]
        torch.cuda.synchronize()
        return time.perf_counter() - start, losses


def make_step(kind: str, longest: int, options: argparse.Namespace) -> tuple[Any, Any, int]:
    """(step, model, fused blocks): as `engine/build.py` makes them, from random weights."""
    from automodel.engine.captured import CapturedStep
    from automodel.kernels.flat_adamw import FlatAdamW
    from automodel.kernels.late_update import LateUpdates, late_parameters
    from automodel.kernels.side_stream import SideStream
    from automodel.losses.config import LossConfig
    from automodel.losses.task_loss import make_loss
    from automodel.models.forward import make_forward
    from automodel.models.fuse import fuse, layers_of
    from automodel.optim.build import parameter_groups
    from automodel.optim.config import LRSchedulerConfig, OptimizerConfig
    from automodel.optim.schedule import Schedule

    torch.manual_seed(0)
    model = make_model(kind).cuda().train()
    layers = [] if options.plain_update else layers_of(model)
    optimizer = FlatAdamW(
        parameter_groups(model, OptimizerConfig(weight_decay=0.01)), lr=2e-5, max_norm=1.0,
        copy_dtype=torch.bfloat16, lr_factors=torch.ones(10_000, dtype=torch.float64),
        lazy=None if options.plain_embeddings else model.get_input_embeddings().weight,
        late=late_parameters(layers),
    )  # fmt: skip
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    side = SideStream()
    fused = fuse(model, seed, side, longest)
    forward = make_forward(model, TASK, "packed", swapped=bool(fused))
    step = CapturedStep(
        model, forward, make_loss(LossConfig(), TASK, None, 2), optimizer,
        Schedule(LRSchedulerConfig(name="constant"), 10_000), peak_lr=2e-5, seed=seed, accumulates=False,
        device="cuda", side=side, late=LateUpdates(optimizer, layers, side.stream) if layers else None,
    )  # fmt: skip
    return step, model, fused


def make_probe(name: str, options: argparse.Namespace) -> Probe:
    from automodel.data.batch import StepBatch
    from automodel.data.collate import PackedCollator
    from automodel.data.samples import SampleWriter
    from automodel.data.store import TokenStore
    from automodel.models.families import packing_support

    kind, size, (mu, sigma, low, high) = WORKLOADS[name]
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(mu, sigma, ROWS).astype(int), low, high)
    writer = SampleWriter()
    for row, length in enumerate(lengths):
        ids = rng.integers(1000, 30000, length)
        ids[1:9] = 2000 + row % 2
        writer.add(row, ids.tolist(), label=row % 2)
    bucket = options.bucket or 2 ** round(np.log2(max(1.0, size * lengths.mean() / 32)))
    step, model, fused = make_step(kind, high, options)
    collate = PackedCollator(
        TokenStore.in_memory(writer.finish()),
        task=TASK,
        pool=packing_support(model.config, TASK).pooling,
        bucket_tokens=int(bucket),
        max_seqlen=high,
        micro_batch_size=size,
        sort_tokens=True,
        longest_first=True,
    )
    order = rng.permutation(ROWS)
    groups = [order[i : i + size] for i in range(0, ROWS - size + 1, size)]
    batches = [StepBatch((collate(g),), 0, i) for i, g in enumerate(groups)]
    return Probe(step, batches, fused, int(bucket))


def measure(name: str, probe: Probe) -> None:
    gc.collect()  # an earlier model's memory is not this one's
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    first, losses = probe.epoch()
    count = len(probe.batches)
    times = [probe.epoch()[0] / count * 1e3 for _ in range(5)]
    values = torch.stack(losses).tolist()
    tokens = sum(b.num_tokens for b in probe.batches) / count
    padded = sum(b.micro_batches[0].input_ids_T.numel() for b in probe.batches) / count
    gib = 2**30
    print(
        f"{name}: fused {probe.fused} blocks, bucket {probe.bucket}, {len(probe.step.graphs)} graphs; "
        f"first epoch {first:.2f} s; {np.median(times):.3f} ms/step (min {min(times):.3f}); "
        f"{tokens:.0f} tokens ({padded / tokens - 1:.1%} tail); "
        f"loss {np.mean(values[:5]):.3f} -> {np.mean(values[-5:]):.3f}; "
        f"peak {torch.cuda.max_memory_allocated() / gib:.2f} GiB, "
        f"reserved {torch.cuda.max_memory_reserved() / gib:.2f}",
        flush=True,
    )


def print_profile(probe: Probe, options: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for i, b in enumerate(probe.batches[:PROFILED]):
            probe.step(i, b)
        torch.cuda.synchronize()
    if options.trace:
        found.export_chrome_trace(options.trace)
    kernels = sorted(found.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in kernels) / PROFILED / 1e3
    print(f"  kernels: {total:.3f} ms and {sum(e.count for e in kernels) / PROFILED:.0f} launches a step")
    for e in kernels[: options.rows]:
        print(f"  {e.device_time_total / PROFILED:8.1f} us {e.count / PROFILED:6.1f}x {e.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["distilbert-b8"])
    parser.add_argument("--bucket", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--plain-embeddings", action="store_true", help="every row of the word table in every update")
    parser.add_argument("--plain-update", action="store_true", help="the whole update at the end of a step")
    parser.add_argument("--trace", help="also write the profile as a Chrome trace")
    parser.add_argument("--late-programs", type=int, help="programs a processor of an update beside a forward pass")
    options = parser.parse_args()
    if options.late_programs:
        from automodel.kernels import adamw

        adamw.LATE_PROGRAMS_PER_PROCESSOR = options.late_programs
    for name in options.names:
        probe = make_probe(name, options)
        measure(name, probe)
        if options.profile:
            print_profile(probe, options)


if __name__ == "__main__":
    main()
