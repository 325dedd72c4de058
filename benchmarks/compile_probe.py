"""What compiled blocks save and cost: `python benchmarks/compile_probe.py [albert-base …]` on a GPU, about 100 s.

Three models with stock blocks, packed and captured, each at two batch sizes: ms a step not compiled and compiled,
seconds of compiling with an empty cache and, in a second process, with the one that the first left. One JSON line for
each, and at the end one for each model with the two constants of `plan/compile_pays.py` that its numbers give:

    saved seconds of a step = blocks × (BLOCK_S + tokens × width × BYTES / BANDWIDTH)

The time limit is kept by leaving models out, which is said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from automodel.tasks.registry import task_named

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

MODELS = ("albert-base", "bert-base", "decoder-12")
BATCHES = (8, 32)
LONGEST, ROWS = 512, 512
BANDWIDTH = 4.25e12
TASK = "text-classification"


def make_model(name: str) -> Any:
    import transformers as t

    if name == "albert-base":
        small = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
        return t.AlbertForSequenceClassification(t.AlbertConfig(num_labels=2, **small))
    if name == "bert-base":
        return t.BertForSequenceClassification(t.BertConfig(num_labels=2))
    config = t.LlamaConfig(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=2048, vocab_size=32000,
        num_labels=2, pad_token_id=0,
    )  # fmt: skip
    return t.LlamaForSequenceClassification(config)


def make_batches(size: int, pool: str) -> list[Any]:
    """Lengths as in the `distilbert` workloads; buckets of an eighth of a batch, so that shapes are few."""
    import numpy as np

    from automodel.data.batch import StepBatch
    from automodel.data.collate import PackedCollator
    from automodel.data.samples import SampleWriter
    from automodel.data.store import TokenStore

    rng, writer = np.random.default_rng(0), SampleWriter()
    lengths = np.clip(rng.lognormal(5.4, 0.55, ROWS).astype(int), 16, LONGEST)
    for row, length in enumerate(lengths):
        writer.add(row, rng.integers(1000, 30000, length).tolist(), label=row % 2)
    collate = PackedCollator(
        TokenStore.in_memory(writer.finish()), place=task_named(TASK).rows.labels, pool=pool,
        bucket_tokens=size * 32, max_seqlen=LONGEST, micro_batch_size=size,
    )  # fmt: skip
    rows = np.array_split(rng.permutation(ROWS), ROWS // size)
    return [StepBatch((collate(part.tolist()),), 0, index) for index, part in enumerate(rows)]


def make_step(name: str, compiled: bool, mode: str | None) -> Any:
    import torch

    from automodel.engine.captured import CapturedStep
    from automodel.kernels.flat_adamw import FlatAdamW
    from automodel.models.compiled_blocks import compile_blocks
    from automodel.models.forward import make_forward
    from automodel.optim.build import parameter_groups
    from automodel.optim.config import LRSchedulerConfig, OptimizerConfig
    from automodel.optim.schedule import Schedule
    from automodel.tasks.loss_config import LossConfig

    torch.manual_seed(0)
    model = make_model(name).cuda().train()
    optimizer = FlatAdamW(
        parameter_groups(model, OptimizerConfig(weight_decay=0.01)), lr=2e-5, max_norm=1.0, copy_dtype=torch.bfloat16,
        lr_factors=torch.ones(100_000, dtype=torch.float64),
    )  # fmt: skip
    forward = make_forward(model, task_named(TASK).head, "packed")
    if compiled:
        compile_blocks(model, mode=mode, dynamic=True)
    return CapturedStep(
        model, forward, task_named(TASK).loss(LossConfig(), None, 2), optimizer,
        Schedule(LRSchedulerConfig(name="constant"), 100_000), peak_lr=2e-5,
        seed=torch.zeros(1, dtype=torch.int64, device="cuda"), accumulates=False, device="cuda", compiled=compiled,
    )  # fmt: skip


def seconds_of(work: Callable[[], Any]) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_compile(step: Any, batch: Any) -> float:
    import torch

    with torch.compiler.set_stance("force_eager"):
        step.probe(batch)
    first, second = (seconds_of(lambda: step.probe(batch)) for _ in range(2))
    step.try_recording(batch)
    return first - second


def ms_per_step(step: Any, batches: list[Any]) -> float:
    """Median of four passes after one that records the graphs."""

    def once() -> None:
        for index, batch in enumerate(batches):
            step(index, batch)

    once()
    return sorted(seconds_of(once) for _ in range(4))[1] / len(batches) * 1e3


def measure(name: str, mode: str | None, cache: str, imports_s: float) -> Iterator[dict[str, Any]]:
    """Rows of one model. With a warm cache only the compile is timed."""
    import gc

    import torch

    from automodel.engine.captured import Uncaptured

    pool = "last" if name.startswith("decoder") else "first"
    batches = {size: make_batches(size, pool) for size in BATCHES}
    plain_ms = {}
    if cache == "cold":
        step = make_step(name, False, None)
        plain_ms = {size: ms_per_step(step, batches[size]) for size in BATCHES}
        del step
        gc.collect()
        torch.cuda.empty_cache()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    step = make_step(name, True, mode)
    compile_s = imports_s + measure_compile(step, batches[BATCHES[-1]][0].micro_batches[0])
    row = {"model": name, "mode": mode or "default", "cache": cache, "compile_s": round(compile_s, 2)}
    if cache == "warm":
        yield row
    for size, before in plain_ms.items():
        after = ms_per_step(step, batches[size])
        tokens = sum(b.micro_batches[0].input_ids_T.numel() for b in batches[size]) / len(batches[size])
        yield row | {
            "batch": size,
            "tokens": round(tokens),
            "plain_ms": round(before, 3),
            "compiled_ms": round(after, 3),
            "saved_ms": round(before - after, 3),
            "graphs": len(step.graphs),
            "not_captured": sum(isinstance(g, Uncaptured) for g in step.graphs.values()),
            "compiled_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        }


def child(names: list[str], mode: str | None, cache: str, until: float) -> None:
    """One process: every model in turn, as JSON lines."""
    import torch

    imports_s = seconds_of(_import_compiler)  # every run pays it once; here the models share it
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({"cache": cache, "import_compiler_s": round(imports_s, 2), **machine}), flush=True)
    for name in names:
        if time.time() > until:
            print(json.dumps({"model": name, "cache": cache, "left_out": "the time limit was reached"}), flush=True)
            continue
        for row in measure(name, mode, cache, imports_s):
            print(json.dumps(row), flush=True)


def _import_compiler() -> None:
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401


def constants(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """BLOCK_S and BYTES from the two sizes of each model: a line through two points. All have 12 blocks of 768."""
    for name in MODELS:
        points = [r for r in rows if r.get("model") == name and "saved_ms" in r]
        if len(points) == 2:
            (x0, y0), (x1, y1) = ((r["tokens"] * 768 / BANDWIDTH, r["saved_ms"] / 1e3 / 12) for r in points)
            bytes_ = (y1 - y0) / (x1 - x0)
            yield {"model": name, "BLOCK_S": round(y0 - bytes_ * x0, 7), "BYTES": round(bytes_, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--mode", choices=["max-autotune-no-cudagraphs"], help="default: torch.compile's default mode")
    parser.add_argument("--seconds", type=float, default=100, help="no new model is begun after this")
    parser.add_argument("--child", choices=["cold", "warm"], help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.names) - set(MODELS)
    if unknown:
        parser.error(f"unknown model {', '.join(unknown)}; choose from {', '.join(MODELS)}")
    if options.child:
        child(options.names, options.mode, options.child, options.until)
        return
    start, rows = time.time(), []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        environment.pop("TRITON_CACHE_DIR", None)
        for cache, share in (("cold", 0.6), ("warm", 0.9)):
            command = [sys.executable, __file__, *options.names, "--child", cache]
            command += [
                "--until",
                str(start + share * options.seconds),
                *(["--mode", options.mode] if options.mode else []),
            ]
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                rows.append(json.loads(line))
            if process.wait():
                sys.exit(process.returncode)
    for row in constants(rows):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
