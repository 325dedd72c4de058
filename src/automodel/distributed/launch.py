"""`--nproc-per-node N`: the same command, N times, under torchrun.

Torchrun's agent runs in this process and starts the ranks as children. What they print goes where this process prints;
the first rank speaks for all (`world.py`). The command ends with the exit code of the rank that failed first, so that
`2` still means wrong input and `130` an interrupted run whose state was saved. SIGUSR1, which torchrun does not know,
is passed on to the ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from automodel.config.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK


def launch(ranks: int, arguments: Sequence[str], after_a_loss: str = "") -> int:
    """Runs `automodel arguments…` in so many processes on this machine, and returns the exit code of them all.
    `after_a_loss`: what to do when a rank was killed."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    # Its log lines say in five ways what is said once below; each of its modules has a logger with a level of its own.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")  # after a signal: large models take long to save
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, _pass_on)
    settings = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "0", "--monitor-interval", "0.1"]
    try:
        torchrun.run(torchrun.parse_args([*settings, "-m", "automodel", *arguments]))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        return exit_code_of(rank, failure.exitcode, after_a_loss)
    except SignalException:
        return EXIT_INTERRUPTED  # the ranks were told, and saved
    return EXIT_OK


def _pass_on(number: int, frame: object) -> None:
    """A signal to every rank."""
    import psutil

    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            child.send_signal(number)


def exit_code_of(rank: int, code: int, after_a_loss: str = "") -> int:
    """The command's exit code for that of a rank; a rank that was killed could not say so itself."""
    if code >= 0:
        return code or EXIT_FAILED
    name = signal.Signals(-code).name
    more = f"\n{after_a_loss}" if after_a_loss else ""
    print(f"error: rank {rank} was ended by {name}, so all ranks were stopped.{more}", file=sys.stderr)
    return 128 - code
