"""Memory that is freed in one step and asked for again in the next stays with the process, on the CPU.

A step asks for the same large blocks every time: activations, gradients, a temporary of each product. glibc takes
large blocks from the kernel and gives them back when they are freed, so every step gets new pages, each of which the
kernel has to find and to clear at its first touch: 11,450 page faults a step for MiniLM, 2 to 5 % of its time. Told
never to map blocks and never to trim the heap, glibc finds last step's block, whose pages are there.

The price is memory: what the largest moment needed is kept until the run is over. Then everything is put back as a
long-lived process has it anyway, and free pages go back to the kernel.

The setting belongs to the whole process and to one allocator. So it is made only where `malloc` really is glibc's (not
on other systems, not under a preloaded jemalloc or tcmalloc), and not where somebody has tuned it by environment.
`M_MMAP_MAX` is used and not `M_MMAP_THRESHOLD`, whose larger values older versions of glibc refuse.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h
NEVER = -1  # glibc's word for "do not trim"
MOST_MAPPED = 65_536  # glibc's default
# glibc raises both thresholds by itself as large blocks are freed, up to these; a process that trained has got there.
LARGEST_THRESHOLD = 32 * 2**20


@contextmanager
def kept_heap(device: str) -> Generator[None]:
    """Inside, freed memory stays with the process; on the CPU, where the allocator is glibc's own. Else nothing."""
    libc = _glibc(os.environ) if device == "cpu" else None
    if libc is None:
        yield
        return
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, NEVER)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_MAX, MOST_MAPPED)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_THRESHOLD)
        libc.malloc_trim(0)


def _glibc(environment: Mapping[str, str]) -> ctypes.CDLL | None:
    """The C library, where it is glibc, serves this process's `malloc`, and nobody has tuned it."""
    tuned = any(name.startswith("MALLOC_") for name in environment)
    if tuned or "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        return None
    try:
        libc, process = ctypes.CDLL("libc.so.6"), ctypes.CDLL(None)
        known = hasattr(libc, "gnu_get_libc_version")
        return libc if known and _address(libc.malloc) == _address(process.malloc) else None
    except (OSError, AttributeError, TypeError):  # another system (TypeError: Windows has no library without a name)
        return None


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # ty: ignore[invalid-argument-type]
