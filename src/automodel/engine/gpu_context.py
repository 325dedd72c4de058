"""The GPU's context, opened while Python imports.

The driver takes a few tenths of a second to start and to make a context, and needs no Python for it; importing torch
needs nothing but Python. So a command does both at once: a thread asks the driver, without torch, for the context
that torch will use (the device's primary one). If torch asks for it before it is ready, torch waits as it always does.
"""

from __future__ import annotations

import ctypes
import os
import threading
from importlib.util import find_spec
from pathlib import Path


def open_gpu_context() -> threading.Thread | None:
    """Begins to open the context of the GPU this process will use; None where torch has no use for one."""
    if not _torch_is_built_for_cuda():
        return None
    # As torch does before its first call: kernels are loaded when they are used. The driver reads it once.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    thread = threading.Thread(target=_open, name="gpu-context", daemon=True)
    thread.start()
    return thread


def _open() -> None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    number = int(os.environ.get("LOCAL_RANK") or 0)
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), number) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _torch_is_built_for_cuda() -> bool:
    found = find_spec("torch")
    return bool(found and found.origin) and (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists()
