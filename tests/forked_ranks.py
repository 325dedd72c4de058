"""Work on several ranks: processes on the CPU, forked from this one, which has imported torch already."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
import torch.multiprocessing as mp

from automodel.distributed.world import joined


def spawn(ranks: int, work: Callable, *arguments) -> None:
    """Calls `work(ranks, *arguments)` in so many processes, and waits for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_rank, (ranks, port, work, arguments), nprocs=ranks, start_method="fork")


def _rank(rank: int, ranks: int, port: int, work: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with joined() as group:
        work(group, *arguments)
