"""What a checkpoint costs training: `python benchmarks/async_save.py --rows rows.json`, on a GPU.

Makes the row llama1b-async-save.
The run is built as `finetune` builds it, and its steps are timed in blocks: without a save, then with one at the start
of the block. The difference is the stall: the snapshot, and whatever the writing thread takes away from the steps
beside it. The row also says how long the disk took, how fast steps were meanwhile, and with `--compare` what a save
costs that training waits for (`async_save: false`).

    --workload llama1b-4k     any of benchmarks/workloads.py, or
    --run run.yaml            a config of your own
    --disk DIR                where the checkpoints go (two of them at a time; 15 GB each for llama1b-4k)
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads import WORKLOADS, commit_here, make

from automodel.benchmark.rows import merge_into


class Trained:
    """A built run, whose steps are made one by one."""

    def __init__(self, config: Path, settings: list[str], out: Path):
        from automodel.engine.build import build
        from automodel.engine.folder import open_folder, start_fresh
        from automodel.engine.prepare import prepare_run
        from automodel.metrics.progress import Progress
        from automodel.plan.check import load_run_config

        cfg = load_run_config(
            [config],
            [*settings, "checkpoint.enabled=true", f"checkpoint.checkpoint_dir={out}", "checkpoint.keep_last=1",
             "checkpoint.keep_best=false", "step_scheduler.max_steps=100000"],
        )  # fmt: skip
        folder = open_folder(str(out), resume=False, overwrite=False)
        prepared = prepare_run(cfg)
        self.run = build(prepared, folder, lambda total, start: Progress(total), resume=False, started=0.0)
        start_fresh(folder)
        self.batches: Iterator[Any] = iter(self.run.loader)
        self.device = prepared.plan.device

    def steps(self, count: int) -> None:
        for _ in range(count):
            batch = next(self.batches)
            self.run.state.add(self.run.step(self.run.state.step, batch), batch.epochs_done)

    def finish_device(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def block(self, count: int, saves: bool = False) -> tuple[float, float]:
        """Seconds of a block of steps, and of the call that saves at its start."""
        from automodel.engine.build import save

        self.finish_device()
        began = time.perf_counter()
        if saves:
            save(self.run)
        called = time.perf_counter() - began
        self.steps(count)
        self.finish_device()
        return time.perf_counter() - began, called


def measure(trained: Trained, count: int, saves: int) -> dict[str, Any]:
    """Milliseconds of a step, of the stall, of steps beside the writing, and what was written."""
    store = trained.run.checkpoints
    assert store is not None
    trained.block(max(10, count // 2))  # captures
    plain = [trained.block(count)[0] for _ in range(5)]
    usual = statistics.median(plain)
    stalls, calls, drains, beside = [], [], [], []
    for _ in range(saves + 1):
        began = time.perf_counter()
        took, called = trained.block(count, saves=True)
        stalls.append(took - usual)
        calls.append(called)
        while store.writing:
            beside.append(trained.block(count)[0])
        drains.append(time.perf_counter() - began)
        store.wait()
        print(f"save: stall {1e3 * stalls[-1]:.1f} ms, call {1e3 * called:.1f} ms, drained in {drains[-1]:.1f} s")
    size = store.complete()[-1].size()
    return {
        "ms_per_step": 1e3 * usual / count,
        "ms_p20": 1e3 * sorted(plain)[1] / count,
        "ms_p80": 1e3 * sorted(plain)[3] / count,
        "stall_ms": 1e3 * statistics.median(stalls[1:]),
        "stall_steps": statistics.median(stalls[1:]) / (usual / count),
        "first_stall_ms": 1e3 * stalls[0],  # memory for the copy is taken once
        "save_call_ms": 1e3 * statistics.median(calls[1:]),
        "drain_s": statistics.median(drains[1:]),
        "ms_per_step_while_writing": 1e3 * statistics.median(beside or [usual]) / count,
        "snapshot": store.last_place,
        "checkpoint_gb": size / 1e9,
    }


def without_the_background(trained: Trained, count: int, usual_ms: float) -> float:
    """Milliseconds that training stands still while a checkpoint is written as it waits."""
    store = trained.run.checkpoints
    assert store is not None
    store.background = False
    return 1e3 * trained.block(count, saves=True)[0] - count * usual_ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="llama1b-4k", choices=WORKLOADS)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--disk", type=Path, help="folder for checkpoints; a temporary one by default")
    parser.add_argument("--rows", type=Path, help="JSON file to merge the row into")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--saves", type=int, default=2, help="after a first one, which takes the memory")
    parser.add_argument("--compare", action="store_true", help="also time a save that training waits for")
    parser.add_argument("--commit", help="commit to write into the row, in a copy without git")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="section.key=value")
    options = parser.parse_args()
    from automodel.models.lean_imports import import_transformers

    import_transformers()
    with tempfile.TemporaryDirectory(dir=options.disk) as temporary:
        folder = Path(temporary)
        os.environ.setdefault("AUTOMODEL_CACHE", str(folder / "tokens"))
        config = options.run or make(options.workload, folder, 30)
        own = () if options.run else WORKLOADS[options.workload].settings
        trained = Trained(config, [*own, *options.settings], folder / "out")
        found = measure(trained, options.steps, options.saves)
        if options.compare:
            waited = without_the_background(trained, options.steps, found["ms_per_step"])
            found["stall_ms_without_async_save"] = waited
    row = {"workload": "llama1b-async-save", **described(found, options)}
    if options.run or options.workload != "llama1b-4k":
        row["workload"] = f"{options.run or options.workload}-async-save"
    print(json.dumps(row, indent=1))
    if options.rows:
        merge_into(options.rows, [row])
    return 0


def described(found: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    from automodel.benchmark.machine import peak_memory, system_info
    from automodel.plan.hardware import read_hardware

    system = system_info()
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}
    return {
        "provider": "automodel",
        **rounded,
        "peak_gib": round(peak_memory(read_hardware().device)["peak_memory_gib"], 3),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": options.commit or commit_here(),
        "torch": system["torch"],
        "transformers": system["transformers"],
        "gpu": system["gpu_name"],
        "command": shlex.join(["python", *sys.argv]),
    }


if __name__ == "__main__":
    sys.exit(main())
