"""Kernels are compiled while the run is still importing.

The first run of a model on a machine needs some twenty Triton kernels, and Triton compiles them one after the other
when they are first launched: nine seconds in the middle of the first step. But which ones they are is known from the
start (`ahead_facts.py`), and until that step comes the process imports torch and transformers, tokenises and loads
weights, on one of many cores. So a process of its own (`ahead_worker.py`) compiles them meanwhile, and the run finds
them in Triton's cache on disk.

    start(facts)        before torch is imported; at once where there is nothing to do
    wait()              before the first launch; seldom for long
    import_triton()     in the background of a process that will launch: its key is a hash over 400 MB
    import_kernels()    the same, and all kernels of ours, long before the first launch
    load_libraries()    cuBLAS, whose first product takes a third of a second

It never decides anything: without it, or where it fails, the run compiles what it needs as ever.
`AUTOMODEL_COMPILE_AHEAD=0` turns it off.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from pkgutil import iter_modules
from threading import Thread, current_thread
from typing import Any

from automodel.config.cache import cache_folder
from automodel.kernels.ahead_facts import Facts

WORKER = "automodel.kernels.ahead_worker"
SWITCH = "AUTOMODEL_COMPILE_AHEAD"
GPU_SIGNS = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")
"""Files of NVIDIA's driver on Linux, and of WSL's."""
GPU_NAMES = "/proc/driver/nvidia/gpus"
PATIENCE_S = 30.0
"""Longer than compiling everything takes where it is not done ahead: then something is wrong with it."""
NOTICED_S = 0.1
CACHE_KEYS = ("TRITON_CACHE_DIR", "TRITON_HOME", "HOME", "CUDA_VISIBLE_DEVICES")

_process: subprocess.Popen | None = None
_remark: str | None = None
_loading: list[Thread] = []


def start(facts: Facts) -> str | None:
    """Begins to compile what a run with these facts will launch; returns why not where it does not."""
    global _process
    reason = why_never()
    if reason is not None:
        return reason
    stamp = stamp_of(facts)
    if is_compiled(stamp):
        return "everything was compiled before"
    # -P: a file of the user's in this folder, say random.py, must not be taken for a module.
    command = [sys.executable, "-P", "-m", WORKER, facts.to_json(), str(stamp)]
    nowhere = subprocess.DEVNULL
    try:
        _process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    except OSError as error:
        return f"the process could not be started: {error}"
    atexit.register(stop)
    return None


def wait(patience_s: float = PATIENCE_S) -> None:
    """Until the kernels are there. Leaves a remark where that took a noticeable time."""
    global _remark
    if _process is None:
        return
    began = time.perf_counter()
    with suppress(subprocess.TimeoutExpired):
        _process.wait(patience_s)
    failed = _process.poll() != 0
    stop()
    waited = time.perf_counter() - began
    if waited >= NOTICED_S:
        rest = "; not all were, the others are compiled as they are needed" if failed else ""
        _remark = f"Waited {waited:.1f} s for kernels that are compiled once on this machine{rest}"


def take_remark() -> str | None:
    """A sentence for the log, where there was something to remark; once."""
    global _remark
    said, _remark = _remark, None
    return said


def stop() -> None:
    """Ends the process, if it still runs. The ones it started end with it."""
    global _process
    if _process is not None:
        if _process.poll() is None:
            _process.kill()
            _process.wait()
        _process = None


def import_triton() -> Thread | None:
    """Imports Triton and hashes its library (`triton_key`) in the background: the first launch needs both. To be called
    when torch is there."""
    if not has_gpu() or importlib.util.find_spec("triton") is None:
        return None

    def prepare() -> None:
        with suppress(ImportError):  # another version of Triton, which may keep it elsewhere
            from triton.runtime.cache import triton_key

            triton_key()

    thread = Thread(target=prepare, daemon=True)
    thread.start()
    return thread


@functools.cache
def import_kernels() -> Thread | None:
    """For a script that will train later: Triton and our kernels, imported while it reads its model and data. Once. A
    fork waits for it: the child would wait for ever for a module that is half imported."""
    if multiprocessing.parent_process() is not None:  # a loader's worker, which imports the script again
        return None
    first = import_triton()
    if first is None:
        return None

    def prepare() -> None:
        first.join()
        for module in iter_modules([str(Path(__file__).parent)]):
            if module.name.endswith("_triton"):
                with suppress(Exception):  # it decides nothing; whoever launches the kernel will see the error
                    importlib.import_module(f"automodel.kernels.{module.name}")

    thread = Thread(target=prepare, daemon=True)
    thread.start()
    os.register_at_fork(before=lambda: thread.join() if current_thread() is not thread else None)
    return thread


@functools.cache
def load_libraries(device: Any) -> Thread | None:
    """For a script whose model is on the GPU and which will train in a moment: the first matrix product, forward and
    backward, in the background. Once."""
    if not has_gpu():
        return None

    def prepare() -> None:
        import torch

        with suppress(RuntimeError):  # it decides nothing
            x = torch.ones((64, 64), dtype=torch.bfloat16, device=device)
            y = torch.nn.functional.linear(x, x, x[0])
            torch.mm(y, x)
            torch.mm(y.t(), x)

    thread = Thread(target=prepare)  # no daemon: one that is inside of CUDA when Python ends takes the process with it
    thread.start()
    _loading.append(thread)
    return thread


def wait_for_imports() -> None:
    """Until everything is done that was begun in the background of this process."""
    if (imports := import_kernels()) is not None:
        imports.join()
    while _loading:
        _loading.pop().join()


def why_never() -> str | None:
    """The reason to compile nothing ahead on this machine, whatever the model."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if not has_gpu():
        return "there is no NVIDIA GPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter compiles nothing"
    if not hasattr(os, "fork"):
        return "this system cannot fork"
    return None


def has_gpu() -> bool:
    """Whether there is a GPU for this process, without asking torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return False
    return any(os.path.exists(path) for path in GPU_SIGNS)


def stamp_of(facts: Facts) -> Path:
    """Where it says that these facts were compiled, by this code, with these versions, for this GPU and this cache."""
    digest = hashlib.sha256(facts.to_json().encode())
    sources = sorted(Path(__file__).parent.glob("*.py"))
    for source in (*sources, *_version_files()):
        digest.update(source.read_bytes())
    for gpu in sorted(Path(GPU_NAMES).glob("*/information")):
        with suppress(OSError):
            digest.update(gpu.read_bytes().split(b"IRQ")[0])  # what follows the model's name is of this boot
    digest.update(repr([sys.version, *(os.environ.get(key) for key in CACHE_KEYS)]).encode())
    return cache_folder() / "kernels" / f"{digest.hexdigest()[:32]}.json"


def _version_files() -> list[Path]:
    """Files that name the versions of Triton and torch; importing them takes seconds."""
    found = []
    for package, file in (("triton", "__init__.py"), ("torch", "version.py")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            found.append(Path(spec.origin).with_name(file))
    return [path for path in found if path.exists()]


def is_compiled(stamp: Path) -> bool:
    """Whether the stamp is there, and all that it lists still lies in Triton's cache."""
    try:
        files = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return False
    return all(os.path.exists(file) for file in files)
