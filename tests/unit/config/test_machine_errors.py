"""What the machine refuses is said in one line with a way out, however a library wraps it."""

import errno
import os

import pytest

from automodel.config.errors import UserError
from automodel.config.machine_errors import of_the_machine, shortage


def wrapped(error: Exception) -> Exception:
    """As `datasets` does: the cause is kept, the text is another."""
    try:
        try:
            raise error
        except Exception as cause:
            raise ValueError("An error occurred while generating the dataset") from cause
    except ValueError as outer:
        return outer


def os_error(number: int, name: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), name)


SHORT = [
    (os_error(errno.EMFILE, "/data/rows.npy"), "ulimit -n"),
    (os_error(errno.EIO, "/data/rows.npy"), "the disk failed at /data/rows.npy"),
    (os_error(errno.ENOMEM), "no more memory"),
    (MemoryError(), "no more memory"),
    (RuntimeError("can't start new thread"), "no more threads"),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "no more threads"),
    (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "no more memory"),
    (
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
        "no more memory",
    ),
    (
        RuntimeError("unable to allocate shared memory(shm) for file </torch_77_1>: No space left on device (28)"),
        "dataloader.num_workers",
    ),
    (
        RuntimeError(
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are "
            "out of shared memory."
        ),
        "dataloader.num_workers",
    ),
]
REFUSED = [
    (os_error(errno.ENOSPC, "/out/x"), "refused /out/x: No space left on device. Make room"),
    (os_error(errno.EACCES, "/out/x"), "refused /out/x: Permission denied. Allow it"),
    (os_error(errno.ENAMETOOLONG, "x" * 300), "no file or folder can be called xxx"),
    (RuntimeError("I/O error: No space left on device (os error 28)"), "Make room"),
]


@pytest.mark.parametrize(("error", "said"), SHORT + REFUSED)
@pytest.mark.parametrize("how", [lambda error: error, wrapped], ids=["as it is", "wrapped"])
def test_every_refusal_has_a_line(error, said, how):
    line = of_the_machine(how(error))
    assert line is not None
    assert said in line
    assert "\n" not in line


@pytest.mark.parametrize("error", [error for error, _ in REFUSED])
def test_a_file_that_is_refused_is_no_shortage(error):
    """Readers of data name the key for those."""
    assert shortage(wrapped(error)) is None


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("Cannot allocate memory"), FileNotFoundError(2, "no such file"), UserError("x")]
)
def test_other_errors_are_left_alone(error):
    assert of_the_machine(error) is None


def test_a_full_shared_memory_is_known_by_the_semaphore(monkeypatch):
    """`multiprocessing` raises an error without a name where /dev/shm is full."""
    import multiprocessing
    from multiprocessing import synchronize

    def refuse(*_):
        raise os_error(errno.ENOSPC)

    monkeypatch.setattr(synchronize._multiprocessing, "SemLock", refuse)
    with pytest.raises(OSError, match="No space left") as told:
        multiprocessing.get_context("fork").Lock()
    assert "dataloader.num_workers=0" in str(of_the_machine(told.value))
