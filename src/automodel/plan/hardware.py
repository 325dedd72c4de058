"""What the machine has, as a value. Everything here is a reading; decisions are in decide.py."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from automodel.distributed.gpu_memory import share_of

CPU_MODEL = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part", "CPU variant")
CPU_ABILITIES = ("flags", "Features")
"""Fields of /proc/cpuinfo, on x86 and on Arm."""


@dataclass(frozen=True)
class Hardware:
    """One machine, seen by one process."""

    device: str
    """`cpu` or `cuda`."""
    name: str
    """The GPU's or the processor's name."""
    gpus: int
    memory_gib: float
    """GPU memory that this process may have, or host memory on the CPU."""
    bf16: bool
    """Whether bf16 arithmetic is native (Ampere and newer; CPUs with AMX)."""
    tf32: bool
    cores: int
    fp8: bool = False
    """Whether there are FP8 tensor cores (compute capability 8.9 and newer)."""


def read_hardware() -> Hardware:
    """Reads the machine. CUDA_VISIBLE_DEVICES is respected."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        modern = properties.major >= 8
        return Hardware(
            device="cuda",
            name=properties.name,
            gpus=torch.cuda.device_count(),
            memory_gib=properties.total_memory * share_of(0) / 2**30,
            bf16=modern,
            tf32=modern,
            cores=cores,
            fp8=(properties.major, properties.minor) >= (8, 9),
        )
    flags = _cpu_field("flags").split()
    return Hardware(
        device="cpu",
        name=_cpu_field("model name") or "CPU",
        gpus=0,
        memory_gib=psutil.virtual_memory().total / 2**30,
        # Of a CPU this only says whether stock layers over padded batches take bf16 (`plan/precision.py`).
        bf16="amx_bf16" in flags,
        tf32=False,
        cores=cores,
    )


def processor() -> str:
    """What tells this processor from others: the names and numbers of its model, and a digest of what it can do."""
    fields = [_cpu_field(field) for field in CPU_MODEL]
    abilities = " ".join(_cpu_field(field) for field in CPU_ABILITIES)
    named = [platform.machine(), *(fields if any(fields) else [platform.processor()])]
    digest = hashlib.sha256(abilities.encode()).hexdigest()[:8]
    return " ".join(filter(None, [*named, digest if abilities.strip() else ""]))


def _cpu_field(field: str) -> str:
    """Of the first processor that Linux names."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    except OSError:
        pass
    return ""
