"""The same command, once for each GPU or `--nproc-per-node` times, under torchrun.

Torchrun's agent runs in this process and starts the ranks as children. What they print goes where this process prints;
the first rank speaks for all (`world.py`). The command ends with the exit code of the rank that failed first, so that
`2` still means wrong input and `130` an interrupted run whose state was saved. SIGUSR1, which torchrun does not know,
is passed on to the ranks. Whatever torchrun makes of a signal, this process ends after its ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from automodel.config.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from automodel.distributed.step_aside import BECAUSE, EXIT_ONE_RANK, NOTE

if TYPE_CHECKING:
    import psutil

LAST_WORDS = 30.0
"""Seconds that a rank which did not hear the first signal has after a harder one."""


def launch_or_fewer(ranks: int, fewer: int, arguments: Sequence[str], after_a_loss: str, restarts: int) -> int:
    """`launch` for ranks that nobody asked for: where they find out that `fewer` do better (`step_aside.py`), this
    process becomes the same command with so many, and does not return."""
    before = dict(os.environ)
    with TemporaryDirectory() as folder:
        note = Path(folder) / "why"
        os.environ[NOTE] = str(note)
        code = launch(ranks, arguments, after_a_loss, restarts)
        if code != EXIT_ONE_RANK or not note.exists():
            return code
        why = note.read_text(encoding="utf-8")
    sys.stdout.flush()
    for number in (signal.SIGINT, signal.SIGTERM):  # what is ignored stays so in the command that follows
        signal.signal(number, signal.SIG_DFL)
    again = [sys.executable, "-m", "automodel", *arguments, "--nproc-per-node", str(fewer)]
    return os.execve(sys.executable, again, {**before, BECAUSE: why})


def launch(ranks: int, arguments: Sequence[str], after_a_loss: str = "", restarts: int = 0) -> int:
    """Runs `automodel arguments…` in so many processes on this machine, and returns the exit code of them all. Where a
    rank was killed they are started again, `restarts` times at most, and go on from the last checkpoint: torchrun
    itself would start them again after a wrong config and after a signal, too. `after_a_loss`: what to say at last."""
    for restart in range(restarts + 1):
        rank, code = _run_once(ranks, arguments)
        if code >= 0:
            return code
        name = signal.Signals(-code).name
        if restart < restarts:
            left = f"restart {restart + 1} of {restarts}"
            print(f"warning: rank {rank} was ended by {name}; all ranks start again ({left}).", file=sys.stderr)
            arguments = going_on(arguments, "--resume-or-start")
            continue
        more = f"\n{after_a_loss}" if after_a_loss else ""
        print(f"error: rank {rank} was ended by {name}, so all ranks were stopped.{more}", file=sys.stderr)
        return 128 - code
    raise AssertionError("unreachable")


def going_on(arguments: Sequence[str], how: str) -> list[str]:
    """The same command, for a run that has begun; settings stay last."""
    kept = [argument for argument in arguments if argument not in ("--resume", "--overwrite", "--resume-or-start")]
    return [*kept, how]


def _run_once(ranks: int, arguments: Sequence[str]) -> tuple[int, int]:
    """The rank that failed first and its exit code; below zero where a signal ended it."""
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
        # torchrun would leave a folder behind with every start; one that cannot be removed is no reason to fail.
        with TemporaryDirectory(prefix="automodel-ranks-", ignore_cleanup_errors=True) as logs:
            torchrun.run(torchrun.parse_args([*settings, "--log-dir", logs, "-m", "automodel", *arguments]))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        # Others miss a killed rank at once and may be found dead in the same look, which tells seconds apart only. But
        # SIGTERM is what torchrun itself ends the others with, after wrong input for example.
        for other, found in failed.failures.items():
            if failure.exitcode >= 0 > found.exitcode != -signal.SIGTERM:
                rank, failure = other, found
        return rank, failure.exitcode or EXIT_FAILED
    except SignalException as heard:
        _see_them_end(heard.sigval)
        print(f"Stopped by {signal.Signals(heard.sigval).name}; all ranks have ended.", file=sys.stderr)
        return 0, EXIT_INTERRUPTED  # the ranks were told, and saved
    finally:
        _hear_no_more()
    return 0, EXIT_OK


def _see_them_end(number: int) -> None:
    """Returns when no rank is left. Torchrun has told those that it knew of and waited for them; but a signal that
    comes while it starts them makes it forget them. So those that are left are told, have the same time for saving, and
    are ended then."""
    import psutil

    for heard in (signal.SIGINT, signal.SIGTERM):
        signal.signal(heard, _pass_on)
    patience = float(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    for harder, seconds in ((number, patience), (signal.SIGTERM, LAST_WORDS), (signal.SIGKILL, LAST_WORDS)):
        _pass_on(harder)
        if not psutil.wait_procs(_ranks(), timeout=seconds)[1]:
            return


def _hear_no_more() -> None:
    """The ranks have ended, and this process ends with their exit code: a second signal, which was for them, comes too
    late to change it. The next start of ranks listens again."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _pass_on(number: int, frame: object = None) -> None:
    """A signal to every rank."""
    import psutil

    for rank in _ranks():
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)


def _ranks() -> list[psutil.Process]:
    """The children of this process, but for the one that tidies up after Python's multiprocessing."""
    import psutil

    ranks = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if not any("multiprocessing.resource_tracker" in part for part in child.cmdline()):
                ranks.append(child)
    return ranks
