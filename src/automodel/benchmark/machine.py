"""What a process used of the machine: peak memory, how busy the GPU was, and who else used the processors.

Peak memory is the peak: the allocator's highest value on a GPU (allocated, and reserved, which is what other programs
can no longer have), the highest resident size of the process on the CPU. GPU utilisation is NVML's: the share of time
in which at least one kernel ran, sampled by a thread while the loop runs. It says nothing about how much of the GPU
those kernels used, and NVML averages over up to a second, so runs of a few seconds give only a rough number; the
number of readings is reported with it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

GIB = 2**30
READINGS_PER_S = 20


class GpuWatch:
    """Samples the GPU's utilisation between `start` and `stop`. Without NVML or without a GPU it reports nothing."""

    def __init__(self, device: str):
        self.readings: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._handle = _nvml_handle() if device == "cuda" else None

    def start(self) -> None:
        if self._handle is not None:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Mean utilisation in per cent (None where it cannot be read), and how many readings it rests on."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        mean = sum(self.readings) / len(self.readings) if self.readings else None
        return {"gpu_utilization_percent": mean, "gpu_utilization_readings": len(self.readings)}

    def _sample(self) -> None:
        import pynvml

        while not self._stop.wait(1 / READINGS_PER_S):
            try:
                self.readings.append(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
            except pynvml.NVMLError:
                return


class LoadWatch:
    """How much of the machine's processors *other* programs used between `start` and `stop`.

    A neighbour on the cores slows one side down and not the other, and the ratio then says nothing. With several
    compute threads it is worse than fair sharing: threads that spin at a barrier wait for one that is not running.
    """

    def start(self) -> None:
        self._began = (time.perf_counter(), _busy_seconds(), _own_seconds())

    def stop(self) -> dict[str, Any]:
        """Processor seconds of this process, and the share of all cores that others had."""
        clock, busy, own = self._began
        seconds, used = time.perf_counter() - clock, _own_seconds() - own
        others = max(0.0, _busy_seconds() - busy - used)
        share = others / (seconds * (os.cpu_count() or 1)) if seconds > 0 else 0.0
        return {"cpu_s": used, "other_load_percent": min(100.0, share * 100)}


def _busy_seconds() -> float:
    import psutil

    times = psutil.cpu_times()._asdict()
    return sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))


def _own_seconds() -> float:
    import psutil

    own = psutil.Process()
    mine = own.cpu_times()
    # Data loader workers are ours too.
    return mine.user + mine.system + sum(_cpu_seconds(child) for child in own.children(recursive=True))


def _cpu_seconds(process: Any) -> float:
    import psutil

    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


def _nvml_handle() -> Any:
    """NVML's handle of the GPU that torch calls 0; by UUID, since CUDA_VISIBLE_DEVICES renumbers them."""
    try:
        import pynvml
    except ImportError:
        return None
    import torch

    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None


def peak_memory(device: str) -> dict[str, Any]:
    """The process's peaks in GiB. `peak_memory_gib` is the one to compare: GPU memory where there is a GPU."""
    host = _peak_resident()
    if device != "cuda":
        return {
            "memory_kind": "host",
            "peak_memory_gib": host,
            "peak_host_gib": host,
            "peak_allocated_gib": 0.0,
            "peak_reserved_gib": 0.0,
        }
    import torch

    allocated = torch.cuda.max_memory_allocated() / GIB
    return {
        "memory_kind": "gpu",
        "peak_memory_gib": allocated,
        "peak_host_gib": host,
        "peak_allocated_gib": allocated,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def _peak_resident() -> float:
    if sys.platform == "linux":
        # Not getrusage: after an exec Linux still counts the memory of the parent in `ru_maxrss`.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / GIB
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB
    import psutil

    info = psutil.Process().memory_info()
    return getattr(info, "peak_wset", info.rss) / GIB


def processor() -> str:
    """The processor, with what its arithmetic depends on: `AMD EPYC 9B14 (family 25, model 17), avx512_bf16`."""
    import platform

    about: dict[str, str] = {}
    with suppress(OSError):  # there is no such file outside Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            about.setdefault(name.strip(), value.strip())
    words = about.get("model name") or platform.processor() or platform.machine() or "unknown"
    if "cpu family" in about:
        words += f" (family {about['cpu family']}, model {about.get('model', '?')})"
    flags = set(about.get("flags", "").split())
    widest = next((flag for flag in ("avx512f", "avx2") if flag in flags), None)
    known = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags] or [widest]
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    return ", ".join([words, *filter(None, known), *([f"ONEDNN_MAX_CPU_ISA={limit}"] if limit else [])])


def system_info() -> dict[str, Any]:
    """The machine, under the reference script's keys and a few more."""
    import platform

    import torch
    import transformers

    info: dict[str, Any] = {
        "gpu_name": "CPU",
        "gpu_memory_total": 0,
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python_version": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        info |= {
            "gpu_name": properties.name,
            "gpu_memory_total": properties.total_memory // 2**20,  # MiB, as in the reference
            "cuda": torch.version.cuda,
        }
    return info
