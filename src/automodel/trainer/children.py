"""Scripts that start other trainings and look at the GPU's memory when those have ended, under `automodel run`.

The reference's comparison does so: it runs `python baseline.py` and `automodel finetune …` as processes, and afterwards
reads `torch.cuda.memory_allocated()` of its own process, which holds nothing. What its author meant is the most that
the process needed. So memory is watched while a process runs, and that reading is given where there is none of the
script's own; it is said on stderr. `python` is this Python, and scripts of another version of transformers keep their
old names (with stock Trainer: a baseline must stay one).

GPUtil, a package for names and sizes of GPUs that nobody maintains, is stood in for where it is missing.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from typing import Any

import torch

EVERY_S = 0.05
OLD_SCRIPT = "automodel.trainer.old_script"
PYTHONS = ("python", "python3")


class Watched(threading.Thread):
    """The most memory of the first GPU that was in use above what was there in the beginning."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self.before = used_bytes()
        self.most = self.before

    def run(self) -> None:
        while not self.ended.wait(EVERY_S):
            self.most = max(self.most, used_bytes())

    def peak(self) -> int:
        self.ended.set()
        self.join()
        return max(self.most, used_bytes()) - self.before


def used_bytes() -> int:
    """Of the first GPU, by whatever process; 0 where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    except Exception:  # no GPU, no driver, no permission: nothing to read
        return 0


class Children:
    """`subprocess.run` and `torch.cuda.memory_allocated` as such scripts mean them."""

    def __init__(self) -> None:
        self.run_process, self.own_memory = subprocess.run, torch.cuda.memory_allocated
        self.peak: int | None = None

    def run(self, command: Any, *args: Any, **options: Any) -> Any:
        training = translated(command)
        if training is command:  # whatever a library starts
            return self.run_process(command, *args, **options)
        watched = Watched()
        watched.start()
        try:
            return self.run_process(training, *args, **options)
        finally:
            self.peak = watched.peak()

    def memory_allocated(self, device: Any = None) -> int:
        own = self.own_memory(device)
        if own or not self.peak:
            return own
        print(
            "automodel: torch.cuda.memory_allocated(): this process holds nothing; given is the most that the last "
            "process it started needed",
            file=sys.stderr,
        )
        return self.peak

    def places(self) -> list[tuple[Any, str, Any]]:
        return [(subprocess, "run", self.run), (torch.cuda, "memory_allocated", self.memory_allocated)]


def translated(command: Any) -> Any:
    """`python script.py` and `automodel …` by this Python; any other command as it is."""
    if not isinstance(command, list | tuple) or not command:
        return command
    name, *rest = [str(part) for part in command]
    if name in PYTHONS and rest and rest[0].endswith(".py"):
        return [sys.executable, "-m", OLD_SCRIPT, *rest]
    return [sys.executable, "-m", "automodel", *rest] if name == "automodel" else command


def gputil_module() -> types.ModuleType:
    """GPUtil's `getGPUs`, with what scripts read of a GPU: names, and memory in MB."""
    module = types.ModuleType("GPUtil")

    def gpus() -> list[types.SimpleNamespace]:
        found = []
        for number in range(torch.cuda.device_count()):
            free, total = (size / 2**20 for size in torch.cuda.mem_get_info(number))
            found.append(types.SimpleNamespace(
                id=number, name=torch.cuda.get_device_name(number), memoryTotal=total, memoryFree=free,
                memoryUsed=total - free, memoryUtil=1 - free / total,
            ))  # fmt: skip
        return found

    module.getGPUs = gpus  # ty: ignore[missing-attribute]
    return module
