"""A rank that is stopped, as by a frozen machine: the other one names it and the call, and ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

RANK = """
import os, signal
from automodel.distributed.world import joined
with joined() as ranks:
    ranks.total([1.0])
    if ranks.rank == 1:
        print("stopping", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    ranks.total([2.0])
"""


SOON = "from automodel.distributed import processes; processes.MEETING = 1.0\n"


def started(count: int, code: str) -> list[subprocess.Popen]:
    """So many of two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "AUTOMODEL_HANG_SECONDS": "1.5"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


@pytest.mark.slow
def test_a_rank_that_never_comes_is_not_waited_for_for_hours():
    said = started(1, SOON + RANK)[0].communicate(timeout=60)[1]
    assert "not all 2 ranks came to 127.0.0.1:" in said
    assert "within 3 s. Were all of them started, and can they reach that address?" in said


def test_a_stopped_rank_is_named_with_the_call():
    ranks = started(2, RANK)
    try:
        said = ranks[0].communicate(timeout=60)[1]
    finally:
        ranks[1].kill()
        ranks[1].communicate()
    assert ranks[0].returncode == 1
    assert "rank 0 waited in vain in call 3 (adding counts): rank 1 gave no sign of life" in said
