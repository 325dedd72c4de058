"""Where a kernel runs: Triton on a GPU, torch elsewhere.

Every operation of this room has two forms that compute the same function: `x_reference` in torch, and Triton kernels
in `x_triton.py`. Triton is a gigabyte that the CPU installation does not have, and takes time to import, so a
`x_triton` module is imported only after `runs_triton` said yes. With `TRITON_INTERPRET=1` Triton's interpreter runs
the same kernels on CPU tensors, which is how they are tested without a GPU. And where launches are only written down,
to be compiled ahead (`ahead_worker.py`), CPU tensors stand in for those of a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

INTERPRETER_PROCESSORS = 2
"""The interpreter needs milliseconds per program: pretend to be a very small GPU."""

stand_in_processors: int = 0
"""Above 0, CPU tensors stand in for those of a GPU with so many processors."""
HOPPER = 90
stand_in_capability: int = HOPPER
"""Its compute capability, and the interpreter's."""


@functools.cache
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton's interpreter stands in for a GPU in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1" and triton_installed()


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether work on this tensor goes to the Triton kernels rather than to the torch reference.

    Not under torch.compile: Inductor fuses the reference with what stands around it, and could not look into a kernel.
    """
    if torch.compiler.is_compiling() or tensor.numel() == 0:
        return False
    return triton_installed() if tensor.is_cuda or stand_in_processors else interpreting()


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device: how many programs fill it."""
    if device.type != "cuda":
        return stand_in_processors or INTERPRETER_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def capability(device: torch.device) -> int:
    """90 for Hopper."""
    return stand_in_capability if device.type != "cuda" else _capability_of(device)


@functools.cache
def _capability_of(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def power_of_two_above(n: int) -> int:
    """The smallest power of two that is at least n: Triton's blocks have no other sizes."""
    return 1 << max(n - 1, 0).bit_length()
