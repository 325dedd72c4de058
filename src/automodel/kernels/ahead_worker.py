"""The process that compiles kernels ahead: `python -m automodel.kernels.ahead_worker FACTS STAMP`.

Three steps, none of which uses the GPU, so it holds no context and no memory there:

1. Write down. The recipes run with CPU tensors, and Triton's own hook (`jit_cache_hook`) is called for every launch
   with what the kernel would be compiled for. It says "leave it", so nothing is compiled and nothing runs.
2. Compile. Each specialisation is handed to Triton again (`JITFunction.preload`), in several processes forked from
   this one: torch is imported once. The result lands in Triton's cache on disk under the key that the launch itself
   will look for (`tests/gpu/test_kernels_ahead.py`).
3. Leave a stamp with the names of those files, so that the next run does not start this process at all.

Triton up to 3.6 also has the C compiler make a launcher for each signature, and a module for its driver: these too.

Whatever goes wrong in here ends this process or leaves a kernel out; the run then compiles it itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from automodel.kernels.ahead_facts import Facts

MOST_PROCESSES = 12
WARP = 32


class Gpu(NamedTuple):
    capability: int
    """90 for Hopper."""
    processors: int


def read_gpu() -> Gpu | None:
    """The GPU that torch will take, asked of the driver without a context (a few hundred megabytes of its memory)."""
    capability_major, capability_minor, processors = 75, 76, 16  # CU_DEVICE_ATTRIBUTE_…
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None

    def attribute(number: int) -> int:
        return 0 if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value

    return Gpu(attribute(capability_major) * 10 + attribute(capability_minor), attribute(processors))


class Specialisation(NamedTuple):
    """A kernel and what to compile it for, in a form that goes from process to process."""

    module: str
    name: str
    data: str
    """As Triton describes it to itself."""


class StandInDriver:
    """What Triton asks of a driver when it compiles; it would otherwise open the GPU."""

    def __init__(self, capability: int):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, WARP)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


class Recorder:
    """While it is open, launches on CPU tensors are written down, each kind once, and not made."""

    def __init__(self, gpu: Gpu, found: Callable[[Specialisation], Any]):
        self.gpu, self.found = gpu, found
        self.seen: set[tuple[str, str]] = set()

    def __enter__(self) -> None:
        from triton import knobs
        from triton.runtime.driver import driver

        from automodel.kernels import dispatch

        driver.set_active(StandInDriver(self.gpu.capability))
        dispatch.stand_in_processors, dispatch.stand_in_capability = self.gpu.processors, self.gpu.capability
        knobs.runtime.jit_cache_hook = self._write_down

    def __exit__(self, *exception: Any) -> None:
        from triton import knobs

        from automodel.kernels import dispatch

        dispatch.stand_in_processors, dispatch.stand_in_capability = 0, dispatch.HOPPER
        knobs.runtime.jit_cache_hook = None

    def _write_down(self, *, key: Any, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        if (fn.name, str(key)) not in self.seen:
            self.seen.add((fn.name, str(key)))
            self.found(Specialisation(fn.module, fn.name, compile["specialization_data"]))
        return True  # which means: do not compile


def follow_recipes(facts: Facts, gpu: Gpu, found: Callable[[Specialisation], Any]) -> list[str]:
    """Calls `found` with everything a run with these facts will launch; returns what went wrong."""
    import torch

    from automodel.kernels.ahead_recipes import Bench, recipes_for

    torch.set_num_threads(1)
    bench, failed = Bench(facts.on(gpu.capability)), []
    with Recorder(gpu, found):
        for recipe in recipes_for(bench.facts):
            try:
                recipe.run(bench)
            except Exception as error:
                failed.append(f"{recipe.name}: {error}")
    return failed


def compile_one(work: Specialisation) -> str:
    """Compiles into Triton's cache, and returns a file that is there now."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import driver

    capability = json.loads(work.data)["options"]["arch"].removeprefix("sm")
    driver.set_active(StandInDriver(int(capability)))
    kernel = getattr(import_module(work.module), work.name).preload(work.data)
    if hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(kernel.src, kernel.metadata)
    return next(path for path in kernel.metadata_group.values() if path.endswith(".json"))


def compile_driver() -> str:
    """The module through which Triton talks to the GPU's driver."""
    from triton.backends.nvidia import driver as nvidia

    nvidia.CudaUtils()
    return ""


def compile_all(facts: Facts, gpu: Gpu, processes: int) -> tuple[list[str], list[str]]:
    """Files of Triton's cache, and what could not be compiled. Compiling begins with the first launch written down."""
    files, jobs = [], []
    with ProcessPoolExecutor(processes, mp_context=get_context("fork"), initializer=end_with_parent) as pool:
        jobs.append(pool.submit(compile_driver))
        failed = follow_recipes(facts, gpu, lambda found: jobs.append(pool.submit(compile_one, found)))
        for job in jobs:
            try:
                files.append(job.result())
            except Exception as error:
                failed.append(str(error))
    return [file for file in files if file], failed


def end_with_parent() -> None:
    """The kernel ends this process when the one that started it is gone (Linux)."""
    terminate_when_parent_dies = 1  # PR_SET_PDEATHSIG
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(terminate_when_parent_dies, signal.SIGTERM)


def hash_triton() -> Thread:
    """Triton's key is a hash over its whole library, some 400 MB: begun early, beside the import of torch."""
    from triton.runtime.cache import triton_key

    thread = Thread(target=triton_key)
    thread.start()
    return thread


def main(facts: Facts, stamp: Path, gpu: Gpu | None) -> int:
    os.nice(5)  # whoever waits for this process is idle meanwhile; whoever does not goes first
    end_with_parent()
    hashing = hash_triton()
    gpu = gpu or read_gpu()
    if gpu is None:
        return 1
    import torch  # noqa: F401  (once, before the others are forked)

    hashing.join()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    files, failed = compile_all(facts, gpu, max(1, min(MOST_PROCESSES, cores - 1)))
    stamp.parent.mkdir(parents=True, exist_ok=True)
    unfinished = stamp.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(files))
    unfinished.replace(stamp)  # also where something failed: it would fail again, and the run has compiled it since
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    _, facts_json, stamp_path, *rest = sys.argv
    raise SystemExit(main(Facts.from_json(facts_json), Path(stamp_path), Gpu(*map(int, rest)) if rest else None))
