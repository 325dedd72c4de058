"""`automodel doctor`: what this machine has for training, what is missing, and what follows."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

from automodel.config.cache import cache_folder

app = typer.Typer(help="Say what this machine has for training, what is missing, and what follows.")

GIB = 2**30
LITTLE_DISK = 5 * GIB
OPTIONAL = {
    "accelerate": "the drop-in Trainer and `automodel run` do not work: pip install accelerate",
    "bitsandbytes": "`quantization:` and 8-bit optimizers of bitsandbytes do not work: pip install bitsandbytes",
}
"""Packages that some commands need, and what follows where they are missing."""


@dataclass
class Findings:
    """What was looked at, and what is wrong with it."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What is slower or not there; training works all the same."""
    broken: list[str] = field(default_factory=list)
    """What training cannot do without."""

    def add(self, name: str, text: str) -> None:
        self.lines.append((name, text))


@app.command("doctor")
def doctor() -> None:
    """Look at Python, packages, GPU, kernels, memory, disk and cache folders. Nothing is downloaded or changed.

    Exit codes: 0 training works, 1 something that training needs is missing.
    """
    from automodel import __version__
    from automodel.config.errors import EXIT_FAILED

    found = examine()
    width = max(len(name) for name, _ in found.lines)
    print(f"automodel {__version__}")
    for name, text in found.lines:
        print(f"  {name:<{width}}  {text}")
    for title, texts in (("Training does not work:", found.broken), ("Training works. Missing:", found.missing)):
        if texts and not (texts is found.missing and found.broken):
            print(title)
            for text in texts:
                print(f"  - {text}")
    if found.broken:
        raise typer.Exit(EXIT_FAILED)
    if not found.missing:
        print("Training works. Nothing is missing.")


def examine() -> Findings:
    """Everything that is looked at, in the order in which it is printed."""
    found = Findings()
    found.add("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    _examine_packages(found)
    if not found.broken:
        _examine_devices(found)
    _examine_memory(found)
    _examine_folders(found)
    return found


def _examine_packages(found: Findings) -> None:
    for name in ("torch", "transformers", "datasets"):
        found.add(name, _version(name) or "not installed")
        if _version(name) is None:
            found.broken.append(f"{name} is not installed: pip install {name}")
    for name, wanted in _required():
        version = _version(name)
        if version is None and name not in dict(found.lines):
            found.broken.append(f"{name} is not installed: pip install '{name}{wanted}'")
        elif version is not None and not wanted.contains(version, prereleases=True):
            found.broken.append(f"{name} is {version}, and {wanted} is needed: pip install '{name}{wanted}'")
    if not found.broken:
        try:
            import torch  # noqa: F401
        except Exception as error:  # a library of the system that does not fit
            found.broken.append(f"torch cannot be imported: {type(error).__name__}: {error}")
    found.missing.extend(f"{name}: {follows}" for name, follows in OPTIONAL.items() if _version(name) is None)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _required() -> Iterator[tuple[str, Any]]:
    """The packages that the installed automodel requires, and the versions it takes."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # transformers brings it, and is missing, too
        return
    for distribution in dict.fromkeys(metadata.packages_distributions().get("automodel", ())):
        for text in metadata.requires(distribution) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield requirement.name, requirement.specifier


def _examine_devices(found: Findings) -> None:
    import torch

    from automodel.kernels.obstacles import fused_obstacle

    driver, installed = _driver()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(gpus):
        properties = torch.cuda.get_device_properties(number)
        major, minor = properties.major, properties.minor
        found.add(
            f"GPU {number}",
            f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, compute capability {major}.{minor}",
        )
    if not gpus:
        found.add("GPU", f"none that torch can use ({installed} in the machine)" if installed else "none")
    found.add("driver", f"NVIDIA {driver}" if driver else "none of NVIDIA's")
    obstacle = fused_obstacle()
    if obstacle:
        found.add("kernels", f"none: {obstacle}")
        found.missing.append(
            f"fused kernels: {obstacle}. Models train with stock blocks, to the same loss, more slowly"
        )
    else:
        found.add("kernels", "fused steps in Triton" if gpus else "fused layers for processors")
    if not gpus:
        found.missing.append(f"{_why_no_gpu(installed)}. Models train on the processors, to the same loss, more slowly")


def _why_no_gpu(installed: int) -> str:
    """Why torch has no GPU, with what to do where there is one."""
    import torch

    if not installed:
        return "a GPU: there is none in this machine"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"a GPU: CUDA_VISIBLE_DEVICES={hidden!r} hides all {installed}; unset it"
    if torch.version.cuda is None:
        return f"a GPU: torch {torch.__version__} is built without CUDA; install a build of torch with CUDA"
    return f"a GPU: torch needs CUDA {torch.version.cuda}, which the driver does not offer; install a newer driver"


def _driver() -> tuple[str, int]:
    """The version of NVIDIA's driver and how many GPUs it knows; nothing and none without it."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return version if isinstance(version, str) else version.decode(), pynvml.nvmlDeviceGetCount()
    except Exception:  # no package, no library, no permission
        return "", 0


def _examine_memory(found: Findings) -> None:
    try:
        import psutil

        memory = psutil.virtual_memory()
        found.add("memory", f"{memory.total / GIB:.0f} GiB, {memory.available / GIB:.1f} GiB free")
    except ImportError:
        pass  # said among the packages
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found.add("processors", f"{cores} for this process")


def _examine_folders(found: Findings) -> None:
    hub = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    folders = {
        "this folder": (".", "runs are written into it"),
        "cache": (
            str(cache_folder()),
            "tokenised data; AUTOMODEL_CACHE moves it",
        ),
        "hub cache": (os.environ.get("HF_HUB_CACHE") or os.path.join(hub, "hub"), "models; HF_HOME moves it"),
    }
    for name, (text, what) in folders.items():
        folder = Path(text).expanduser().absolute()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        free = shutil.disk_usage(there).free
        found.add(name, f"{folder}: {free / GIB:.0f} GiB free ({what})")
        if not os.access(there, os.W_OK | os.X_OK):
            found.missing.append(f"permission to write to {folder}: {what}")
        elif free < LITTLE_DISK:
            found.missing.append(f"room on the disk: {folder} has {free / GIB:.1f} GiB free ({what})")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        found.add("hub", f"HF_HUB_OFFLINE={os.environ['HF_HUB_OFFLINE']}: only models and data in the cache are found")
