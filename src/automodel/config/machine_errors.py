"""Errors of the machine and not of the program: a disk that fails or is full, no more files, threads or memory.

Each is said in one line with a way out. An error is looked at together with what caused it, since libraries wrap what
the system told them; some (torch, safetensors) keep only the text.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES)

_FILES = "this process may open no more files. Raise the limit (`ulimit -n 65536`), or lower dataloader.num_workers."
_MEMORY = (
    "the machine gave no more memory. Free some, raise the limit (`ulimit -v`, or that of the container or the job), "
    "or lower dataloader.batch_size and dataloader.num_workers."
)
_THREADS = (
    "the machine gave no more threads or processes. Raise the limit (`ulimit -u`, the container's limit of pids, or "
    "its memory), or set dataloader.num_workers=0 and OMP_NUM_THREADS=1."
)
_SHARED = (
    "dataloader.num_workers: workers hand their batches over in /dev/shm, which is full. Set dataloader.num_workers=0, "
    "or make /dev/shm larger (`docker run --shm-size=8g`; in Kubernetes an emptyDir with `medium: Memory`)."
)

_BY_NUMBER = {
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: _THREADS,
}
_BY_TEXT = (
    ("out of shared memory", _SHARED),
    ("shared memory(shm)", _SHARED),
    ("/torch_", _SHARED),  # torch names its files in /dev/shm so
    ("Too many open files", _FILES),
    ("can't start new thread", _THREADS),
    ("Resource temporarily unavailable", _THREADS),
    ("DefaultCPUAllocator", _MEMORY),
    ("Cannot allocate memory", _MEMORY),
    ("failed to map segment", _MEMORY),
    ("could not create a primitive", f"oneDNN made no kernel, which mostly means: {_MEMORY}"),
)


def of_the_machine(error: BaseException) -> str | None:
    """The line to print in the place of a traceback; None where the error is something else."""
    return shortage(error) or _first(_refused, error)


def shortage(error: BaseException) -> str | None:
    """The line for a machine that has no more files, threads or memory, or whose disk fails: it says nothing about the
    file that was being read, so readers of files let such errors pass."""
    return _first(_shortage, error)


def _first(line_of: Callable[[BaseException], str | None], error: BaseException | None) -> str | None:
    """The line of the error, or else of what caused it."""
    for _ in range(10):
        if error is None:
            return None
        line = line_of(error)
        if line is not None:
            return line
        error = error.__cause__ or error.__context__
    return None


def _shortage(error: BaseException) -> str | None:
    if isinstance(error, MemoryError):
        return _MEMORY
    if not isinstance(error, OSError | RuntimeError | ImportError):
        return None
    for part, line in _BY_TEXT:
        if part in str(error):
            return line
    if _number(error) == errno.ENOSPC and _in_a_semaphore(error):
        return _SHARED
    if _number(error) == errno.EIO:
        return (
            f"the disk failed at {_file(error)}: {os.strerror(errno.EIO)}. The system's log (`dmesg`) says more; "
            "`automodel checkpoint verify RUN` names the checkpoints that are whole."
        )
    return _BY_NUMBER.get(_number(error))


def _refused(error: BaseException) -> str | None:
    number = errno.ENOSPC if "(os error 28)" in str(error) else _number(error)  # safetensors has no numbers for errors
    if number == errno.ENAMETOOLONG:
        return f"no file or folder can be called {_file(error)}: {os.strerror(number)}. Name another place."
    if number not in _FULL and number not in _FORBIDDEN:
        return None
    way = "Make room" if number in _FULL else "Allow it"
    return f"the file system refused {_file(error)}: {os.strerror(number)}. {way}, or name another place."


def _number(error: BaseException) -> int:
    return getattr(error, "errno", None) or 0 if isinstance(error, OSError) else 0


def _file(error: BaseException) -> str:
    return getattr(error, "filename2", None) or getattr(error, "filename", None) or "a file"


def _in_a_semaphore(error: BaseException) -> bool:
    """Whether `multiprocessing` raised it: its semaphores lie in /dev/shm, and the error names no file."""
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename.endswith(os.path.join("multiprocessing", "synchronize.py")):
            return True
        frame = frame.tb_next
    return False
