"""Why this machine cannot run fused steps, in words; empty where it can.

On a GPU fused steps are Triton kernels: they need Triton, a C compiler for its launchers, and a GPU with flash
attention. On processors they are torch operations over whole layers (`cpu_layer.py`), which every machine has.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

FIRST_CAPABILITY = 80
"""Ampere."""


def triton_obstacle() -> str:
    """What kernels in Triton need and this machine does not have."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
    if not any(map(shutil.which, compilers)):
        return "there is no C compiler, which Triton needs (install gcc, or set CC)"
    return ""


def fused_obstacle() -> str:
    """Why no model can have fused steps here."""
    import torch

    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability(0)
    if 10 * major + minor < FIRST_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(0)} has compute capability {major}.{minor}, and fused blocks use flash "
            "attention: 8.0 (Ampere) and newer"
        )
    return triton_obstacle()
