"""A rank that waits says for whom, and ends where nobody will come."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from automodel.distributed import watch as watch_module
from automodel.distributed.watch import Watch, patience_of_environment


class Ranks:
    """Two ranks' watches on one store, in this process."""

    def __init__(self):
        self.store, self.said, self.left = dist.HashStore(), [], threading.Event()
        self.watches = [Watch(rank, 2, self.store, patience=0.4) for rank in range(2)]
        for watch in self.watches:
            watch.say, watch.leave = self.said.append, self.left.set


@pytest.fixture
def ranks():
    ranks = Ranks()
    yield ranks
    for watch in ranks.watches:
        watch.end()


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_who_is_missing_is_said_once_with_the_call(ranks):
    with ranks.watches[1].call("adding counts"):
        pass
    for watch in ranks.watches[:1]:
        with watch.call("adding counts"):
            pass
        with watch.call("adding gradients"):
            wait_until(lambda: ranks.said)
            time.sleep(0.5)
    assert len(ranks.said) == 1
    assert "rank 0 has waited" in ranks.said[0]
    assert "in call 2 (adding gradients), at wait_until (distributed/test_watch.py:" in ranks.said[0]
    assert "Not there yet: rank 1 has done 1 calls and works on its own, at " in ranks.said[0]
    assert not ranks.left.is_set()


def test_a_step_that_no_rank_leaves_is_said_with_the_lines_they_are_at(ranks):
    """As where one rank gathers a layer that another never comes to: both are in the same step."""
    first, second = ranks.watches
    with first.call("training a step"), second.call("training a step"):
        with first.call("adding counts"), second.call("adding counts"):
            pass
        assert first.here.doing == "training a step"
        wait_until(lambda: ranks.said)
        time.sleep(0.5)
    assert len(ranks.said) == 1
    assert "no rank has left call 2 (training a step) for" in ranks.said[0]
    assert ranks.said[0].count("wait_until (distributed/test_watch.py:") == 2
    assert not ranks.left.is_set()


def test_a_rank_without_a_sign_of_life_ends_the_job(ranks):
    time.sleep(0.2)
    ranks.watches[1].end()  # as if it were stopped
    with ranks.watches[0].call("adding gradients"):
        wait_until(ranks.left.is_set)
    assert "rank 1 gave no sign of life" in ranks.said[-1]
    assert "call 1 (adding gradients)" in ranks.said[-1]


def test_a_silent_rank_ends_the_job_between_calls_too(ranks):
    time.sleep(0.2)
    ranks.watches[1].end()
    wait_until(ranks.left.is_set)
    assert "(working on its own): rank 1 gave no sign of life" in ranks.said[-1]


def test_nobody_is_reported_who_arrives(ranks):
    for _ in range(3):
        for watch in ranks.watches:
            with watch.call("adding counts"):
                time.sleep(0.05)
    time.sleep(0.6)
    assert not ranks.said


def test_a_store_that_is_gone_ends_the_job_unless_it_is_ending_anyway(ranks, monkeypatch):
    monkeypatch.setattr(watch_module, "FAREWELL", 0.3)

    class Gone:
        def set(self, *_):
            raise RuntimeError("Broken pipe")

    ranks.watches[1].store = ranks.watches[0].store = Gone()
    time.sleep(0.15)
    ranks.watches[1].end()
    wait_until(ranks.left.is_set)
    assert len(ranks.said) == 1
    assert "rank 0 waited in vain in call 0 (working on its own): the first rank, or who started it" in ranks.said[0]


class SlowStore:
    """Answers after a while, as one on a busy machine does."""

    def __init__(self):
        self.asked, self.answered = threading.Event(), threading.Event()

    def set(self, *_):
        self.asked.set()
        time.sleep(0.3)
        self.answered.set()

    def check(self, _):
        return False


def test_the_end_waits_for_the_store(ranks):
    """A thread inside of torch's store while Python ends aborts the process ("terminate called without an active
    exception"), after everything was saved."""
    slow = ranks.watches[0].store = SlowStore()
    assert slow.asked.wait(5)
    ranks.watches[0].end()
    assert slow.answered.is_set()
    slow.asked.clear()
    assert not slow.asked.wait(0.3), "the watch went on after its end"


LEFT_BY_AN_ERROR = """
import sys, threading, time
from automodel.distributed.watch import Watch

class Slow:
    def set(self, *_):
        asked.set()
        time.sleep(0.5)
        print("answered", flush=True)

asked = threading.Event()
watch = Watch(0, 2, Slow(), patience=2)
asked.wait()
sys.exit(3)
"""


def test_a_rank_that_an_error_ends_waits_for_the_store_too():
    done = subprocess.run([sys.executable, "-c", LEFT_BY_AN_ERROR], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()[-1:]) == (3, ["answered"]), done.stderr


def test_patience_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("AUTOMODEL_HANG_SECONDS", "7")
    assert patience_of_environment() == 7
    monkeypatch.setenv("AUTOMODEL_HANG_SECONDS", "soon")
    assert patience_of_environment() == 300
