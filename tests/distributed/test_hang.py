"""A rank that is stopped, as by a frozen machine: the other one names it and the call, and ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

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


def test_a_stopped_rank_is_named_with_the_call():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "AUTOMODEL_HANG_SECONDS": "1.5"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = ranks[0].communicate(timeout=60)[1]
    finally:
        ranks[1].kill()
        ranks[1].communicate()
    assert ranks[0].returncode == 1
    assert "rank 0 waited in vain in call 2 (adding counts): rank 1 gave no sign of life" in said
