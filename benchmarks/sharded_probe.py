"""What FSDP2 costs at one rank: the same steps by the plain eager step and by the sharded one, which at one rank has
nothing to share out but gathers, copies and reduces all the same; the latter with stock blocks and with fused ones,
which are what several ranks run where the family has them.

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
from typing import Any

import workloads  # puts src/ on the path


def measure(name: str, folder: Path, steps: int, settings: list[str], kind: str) -> dict[str, object]:
    """Losses, milliseconds and peak memory of a few steps."""
    import torch

    from automodel.distributed.layout import Layout
    from automodel.engine.prepare import prepare_run
    from automodel.engine.steps import make_step, make_step_loader
    from automodel.plan.check import load_run_config

    known = workloads.WORKLOADS[name].settings if name in workloads.WORKLOADS else ()
    eager = ["training_optimizations.capture=false", "training_optimizations.use_compile=false"]
    prepared = prepare_run(load_run_config([workloads.make(name, folder, steps)], [*known, *eager, *settings]))
    plan = dataclasses.replace(prepared.plan, word_rows=0, fused_kernels=kind == "fused")
    prepared = dataclasses.replace(prepared, plan=plan, layout=Layout() if kind == "plain" else Layout(fsdp=True))
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
    found: dict[str, dict[str, object]] = {}
    for kind in ("plain", "sharded", "fused") * 2:  # in turns: the second round has warm kernels
        with tempfile.TemporaryDirectory() as folder:
            found[kind] = measure(options.workload, Path(folder), options.steps, options.settings, kind)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    dist.destroy_process_group()
    print(json.dumps({"workload": options.workload, **compared(found)}, indent=2))


def compared(found: dict[str, dict[str, Any]]) -> dict[str, object]:
    plain = found["plain"]
    report: dict[str, object] = {"plain_ms": plain["ms"], "plain_gib": plain["peak_gib"], "losses": plain["losses"]}
    for kind in ("sharded", "fused"):
        own = found[kind]
        differences = [abs(a - b) for a, b in zip(plain["losses"], own["losses"], strict=True)]
        report |= {
            f"{kind}_ms": own["ms"], f"{kind}_ratio": own["ms"] / plain["ms"], f"{kind}_gib": own["peak_gib"],
            f"{kind}_largest_loss_difference": max(differences),
        }  # fmt: skip
    return report


if __name__ == "__main__":
    main()
