"""Freed memory stays with the process while a CPU run lasts, and only where the allocator is glibc's own."""

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from automodel.engine.heap import _glibc

GLIBC = platform.libc_ver()[0] == "glibc"
BLOCK = 64 * 2**20
PAGES = BLOCK // os.sysconf("SC_PAGE_SIZE")

# A process of its own: the setting belongs to the whole process, and so do the counted faults.
COUNT_FAULTS = f"""
import ctypes, resource, sys
from automodel.engine.heap import kept_heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def faults(times=4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        block = libc.malloc({BLOCK})
        ctypes.memset(block, 1, {BLOCK})
        libc.free(block)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // times

before = faults()
with kept_heap(sys.argv[1]):
    faults(1)
    inside = faults()
    resident = int(open("/proc/self/statm").read().split()[1])
left = int(open("/proc/self/statm").read().split()[1])
print(before, inside, faults(), resident - left)
"""


def counted(device: str, **environment: str) -> list[int]:
    source = Path(__file__).parents[3] / "src"
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    env |= {"PYTHONPATH": str(source), **environment}
    result = subprocess.run([sys.executable, "-c", COUNT_FAULTS, device], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [int(number) for number in result.stdout.split()]


def huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[always]" in setting.read_text()


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
@pytest.mark.skipif(huge_pages(), reason="with huge pages a block of 64 MB has 32 faults")
class TestFaults:
    def test_a_block_that_was_freed_costs_no_faults_the_second_time(self):
        before, inside, after, given_back = counted("cpu")
        assert before > 0.9 * PAGES
        assert inside < 0.01 * PAGES
        assert after > 0.9 * PAGES
        assert given_back > 0.9 * PAGES

    @pytest.mark.parametrize(
        ("device", "environment"),
        [
            ("cuda", {}),
            ("cpu", {"MALLOC_ARENA_MAX": "2"}),
            ("cpu", {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}),
        ],
    )
    def test_others_are_left_alone(self, device, environment):
        _, inside, _, _ = counted(device, **environment)
        assert inside > 0.9 * PAGES


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
def test_glibc_is_recognised_here():
    assert _glibc({}) is not None


@pytest.mark.parametrize("missing", [OSError("no libc.so.6"), TypeError("a name is needed")])
def test_other_systems_are_left_alone(monkeypatch, missing):
    def absent(name):
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert _glibc({}) is None


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
def test_another_allocator_is_left_alone(monkeypatch):
    """A preloaded allocator answers for `malloc` in the process; here another function stands in for it."""
    load = ctypes.CDLL

    class Process:
        malloc = load("libc.so.6").calloc

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Process() if name is None else load(name))
    assert _glibc({}) is None
