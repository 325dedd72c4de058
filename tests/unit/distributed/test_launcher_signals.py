"""After a signal the launcher of local ranks leaves none of them behind, and says that it was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tiers import quick

LAUNCHER = """
import os, signal, sys, threading
import torch.distributed.elastic.multiprocessing.api as elastic
from automodel.distributed import launch

rank, when, pids = sys.argv[1], sys.argv[2], sys.argv[3]
launch.LAST_WORDS = 1.0
real, started = elastic.get_subprocess_handler, []

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def start(entrypoint, args, **more):
    handler = real(entrypoint=entrypoint, args=("-u", "-c", rank, pids), **more)
    started.append(handler)
    if len(started) == 2:
        if when == "between":  # torchrun has started them, and not noted yet that it has
            while sum(1 for _ in open(pids)) < 2:
                pass
            interrupt()
        for seconds in (1.0, 2.0) if when == "twice" else (1.0,) if when == "later" else ():
            threading.Timer(seconds, interrupt).start()
    return handler

elastic.get_subprocess_handler = start
sys.exit(launch.launch(2, ["finetune"]))
"""
TOLD = "import os, signal, sys, time\n{}\nprint(os.getpid(), file=open(sys.argv[1], 'a'))\ntime.sleep(100)"
QUICK = TOLD.format("signal.signal(signal.SIGINT, lambda *_: os._exit(130))")
DEAF = TOLD.format("for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)")
SAVING = TOLD.format(  # the second signal ends it at once
    "def first(*_):\n    signal.signal(signal.SIGINT, lambda *_: os._exit(3))\n    time.sleep(100)\n"
    "signal.signal(signal.SIGINT, first)"
)


@pytest.mark.parametrize(
    ("rank", "when", "patience"),
    quick(
        [(QUICK, "later", "60"), (QUICK, "between", "60"), (DEAF, "between", "1"), (SAVING, "twice", "60")],
        *[(QUICK, "later", "60"), (DEAF, "between", "1")],
    ),
    ids=["heard", "while they are started", "deaf ranks", "told twice"],
)
def test_no_rank_is_left_behind(tmp_path, rank, when, patience):
    pids = tmp_path / "pids"
    pids.touch()
    env = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": patience}
    command = [sys.executable, "-c", LAUNCHER, rank, when, str(pids)]
    with (tmp_path / "said").open("w") as said:  # no pipe: a rank that is left would hold it open
        code = subprocess.run(command, env=env, stdout=said, stderr=said, timeout=100).returncode
    left = [pid for pid in map(int, pids.read_text().split()) if _lives(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    printed = (tmp_path / "said").read_text()
    assert (code, left) == (130, []), printed
    assert len(pids.read_text().split()) == 2
    assert printed.count("Stopped by SIGINT; all ranks have ended.") == 1


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("rank", "said"), [("0", ""), (None, "Stopped.\n")])
def test_a_command_that_is_stopped_while_python_reads_it(rank, said):
    """A rank that hears the signal before it is anything leaves no traceback."""
    stopped = (
        "import runpy, sys\n"
        "class Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'automodel.cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Hook())\n"
        "runpy.run_module('automodel', run_name='__main__')"
    )
    env = {key: value for key, value in os.environ.items() if key != "RANK"} | ({"RANK": rank} if rank else {})
    done = subprocess.run([sys.executable, "-c", stopped], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, said)
