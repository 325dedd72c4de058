"""Leaving ends the process at once, but not before what others wait for is done."""

import subprocess
import sys

CODE = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from automodel.engine.leave import leave

folder = Path(sys.argv[1])

class Slow:
    def __del__(self):
        time.sleep(30)  # as torch's own teardown, only longer

def write(name):
    time.sleep(0.3)
    (folder / name).write_text("written")

slow = Slow()
atexit.register(lambda: (folder / "at exit").write_text("written"))
threading.Thread(target=write, args=("thread",)).start()
ThreadPoolExecutor(1).submit(write, "executor")
sys.stdout.write("not flushed")
leave(7)
"""


def test_threads_exit_functions_and_output_are_finished(tmp_path):
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert done.stdout == "not flushed"
    assert done.stderr == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at exit", "executor", "thread"]


def test_a_reader_that_is_gone_is_no_traceback():
    code = "import os, sys; from automodel.engine.leave import leave; print('x' * 9); os.close(1); leave(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_finished_work_is_not_ended_by_a_signal():
    kill = "atexit.register(os.kill, os.getpid(), 15)"
    code = f"import atexit, os; from automodel.engine.leave import leave; {kill}; leave({{}})"
    ended = [subprocess.run([sys.executable, "-c", code.format(own)], timeout=60).returncode for own in (0, 1)]
    assert ended == [0, -15]
