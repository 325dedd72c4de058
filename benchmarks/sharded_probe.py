"""What FSDP2 costs at one rank: the same steps by the plain eager step and by the sharded one, which at one rank has
nothing to share out but gathers, copies and reduces all the same.

    python benchmarks/sharded_probe.py llama1b-4k [--steps 12] [--set section.key=value]

One rank of a real run never takes the sharded step: it trains in captured steps, whatever `distributed.strategy` says,
and the plan says so (row `llama1b-4k-fsdp2`). This probe measures the code that several ranks run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import workloads  # puts src/ on the path


def measure(name: str, folder: Path, steps: int, settings: list[str], sharded: bool) -> dict[str, object]:
    """Losses, milliseconds and peak memory of a few steps."""
    import torch

    from automodel.distributed.layout import Layout
    from automodel.engine.prepare import prepare_run
    from automodel.engine.steps import make_step, make_step_loader
    from automodel.plan.check import load_run_config

    known = workloads.WORKLOADS[name].settings if name in workloads.WORKLOADS else ()
    eager = ["training_optimizations.capture=false", "training_optimizations.use_compile=false"]
    prepared = prepare_run(load_run_config([workloads.make(name, folder, steps)], [*known, *eager, *settings]))
    plan = dataclasses.replace(prepared.plan, word_rows=0)
    prepared = dataclasses.replace(prepared, plan=plan, layout=Layout(fsdp=True) if sharded else Layout())
    _, step = make_step(prepared)
    cuda = plan.device == "cuda"
    losses, times = [], []
    for index, batch in zip(range(steps), make_step_loader(prepared), strict=False):
        if cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        losses.append(float(step(index, batch).loss))  # waits for the device
        times.append(1e3 * (time.perf_counter() - begun))
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return {"losses": losses, "ms": statistics.median(times[2:] or times), "peak_gib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args()
    import torch
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1)
    found = {}
    for sharded in (False, True, False, True):  # in turns: the second round has warm kernels
        with tempfile.TemporaryDirectory() as folder:
            found[sharded] = measure(options.workload, Path(folder), options.steps, options.settings, sharded)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    dist.destroy_process_group()
    plain, parts = found[False], found[True]
    differences = [abs(a - b) for a, b in zip(plain["losses"], parts["losses"], strict=True)]
    print(json.dumps({
        "workload": options.workload, "plain_ms": plain["ms"], "sharded_ms": parts["ms"],
        "ratio": parts["ms"] / plain["ms"], "plain_gib": plain["peak_gib"], "sharded_gib": parts["peak_gib"],
        "largest_loss_difference": max(differences), "losses": parts["losses"],
    }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
