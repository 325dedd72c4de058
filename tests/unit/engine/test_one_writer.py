"""Two runs never write into one folder, and whoever fails leaves none behind."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from automodel.config.errors import UserError
from automodel.engine import one_writer
from automodel.engine.one_writer import only_writer

FIRST = SimpleNamespace(first=True, told=lambda make: make())

HOLD = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(one_writer, "LET_GO_S", 0.2)
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    other.stdout.readline()
    with pytest.raises(UserError, match="another run is writing into .* at this moment"), only_writer(tmp_path, FIRST):
        pytest.fail("it was let in")
    other.kill()  # the kernel lets go
    other.wait()
    for _ in range(2):
        with only_writer(str(tmp_path), FIRST):
            pass


def test_workers_that_live_on_do_not_hold_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(one_writer, "LET_GO_S", 0.2)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    with only_writer(str(tmp_path), FIRST):
        worker.start()
    try:
        with only_writer(str(tmp_path), FIRST):
            assert worker.is_alive()
    finally:
        worker.kill()
        worker.join()


def test_a_folder_that_was_removed_and_made_again_is_locked_anew(tmp_path, monkeypatch):
    """The one that waits has the old folder open when the first one ends and removes it."""
    root = tmp_path / "a"
    root.mkdir()
    first = os.open(root, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)

    def end():
        time.sleep(0.15)
        root.rmdir()
        os.close(first)

    ends = threading.Thread(target=end)
    ends.start()
    with only_writer(str(root), FIRST):
        ends.join()
        third = os.open(root, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(third)


@pytest.mark.parametrize("alike", [[False, True], [False] * one_writer.MOST_OTHERS])
def test_a_folder_that_was_made_anew_is_opened_again_but_not_for_ever(tmp_path, monkeypatch, alike):
    """Some file systems number a folder anew each time."""
    answers = list(alike)
    monkeypatch.setattr(os.path, "samestat", lambda *_: answers.pop(0))
    with only_writer(str(tmp_path), FIRST):
        assert answers == []
        other = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)


def test_a_run_that_never_began_leaves_no_folder(tmp_path):
    with only_writer(str(tmp_path / "a" / "b"), FIRST) as make_and_hold:
        assert list(tmp_path.iterdir()) == []
        make_and_hold()
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with only_writer(str(tmp_path / "a" / "b"), FIRST) as make_and_hold:
        make_and_hold()
        (tmp_path / "a" / "b" / "config.json").write_text("{}")
    assert (tmp_path / "a" / "b" / "config.json").exists()


def test_a_folder_that_another_run_made_meanwhile_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(one_writer, "LET_GO_S", 0.2)
    with only_writer(str(tmp_path / "a"), FIRST) as make_and_hold:
        with only_writer(str(tmp_path / "a"), FIRST) as of_another:
            of_another()
            with pytest.raises(UserError, match="another run is writing into .* at this moment"):
                make_and_hold()
        make_and_hold()


def test_what_is_no_folder_is_left_to_others(tmp_path):
    (tmp_path / "file").write_text("mine")
    with only_writer(str(tmp_path / "file"), FIRST) as make_and_hold:
        make_and_hold()
    assert (tmp_path / "file").read_text() == "mine"
