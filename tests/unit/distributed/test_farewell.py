"""Gloo's threads have let go of Python before it ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from automodel.distributed import farewell
from automodel.distributed.farewell import GLOO, wait_for_gloo

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what a thread does")


def busy_then_asleep(seconds: float, ended: threading.Event) -> tuple[threading.Thread, list[float]]:
    """A thread of gloo's name that works for a while, and sleeps then; and when it began to sleep."""
    done: list[float] = []
    ready = threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(GLOO)
        ready.set()
        until = time.monotonic() + seconds
        while time.monotonic() < until and not ended.is_set():
            sum(range(1000))
        done.append(time.monotonic())
        ended.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    return thread, done


def test_it_waits_for_a_thread_at_work_and_not_for_one_that_sleeps():
    ended = threading.Event()
    thread, done = busy_then_asleep(0.3, ended)
    try:
        wait_for_gloo()
        assert done
        begun = time.monotonic()
        wait_for_gloo()
        assert time.monotonic() - begun < farewell.FAREWELL
    finally:
        ended.set()
        thread.join()


def test_it_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(farewell, "FAREWELL", 0.1)
    ended = threading.Event()
    thread, done = busy_then_asleep(60.0, ended)
    try:
        wait_for_gloo()
        assert not done
    finally:
        ended.set()
        thread.join()


def test_without_such_threads_or_such_a_system_it_returns_at_once(tmp_path):
    begun = time.monotonic()
    wait_for_gloo(tmp_path)
    wait_for_gloo(tmp_path / "none")
    assert time.monotonic() - begun < 0.5


def test_torch_names_its_threads_so():
    """A group that something holds keeps them after its end: it is these that are waited for."""
    script = """
import sys, torch, torch.distributed as dist
from automodel.distributed import farewell
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.held = dist.group.WORLD
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
print(len(farewell._states(farewell.Path("/proc/self/task"))))
farewell.wait_for_gloo()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
