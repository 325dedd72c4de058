"""One run at a time in a run folder.

Two runs that write into one folder, started twice by mistake or by a sweep that forgot to name its folders, would mix
their checkpoints and metrics, and the second would put the first one's `run/` aside while it is being written. So the
first rank of a run holds a lock on the folder (`flock` on the directory: no file is left behind, and the kernel lets go
of it however the process ends). Workers of a process that was killed hold it a moment longer, hence the waiting. Where
a file system has no such locks, runs go on without; NFS keeps those of folders on each machine by itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from automodel.config.errors import UserError
from automodel.distributed.world import Alone

LET_GO_S = 10.0  # workers notice within 5 s that the process they work for is gone
MOST_OTHERS = 3  # times that a folder is found to be another one than was opened; some file systems never number alike


@contextmanager
def only_writer(checkpoint_dir: str, ranks: Alone) -> Generator[Callable[[], None]]:
    """Holds the run folder, where there is one, for as long as the block lasts; the block gets a function that makes it
    and holds it where there is none. Until the data and the model have been read, none is made: its name may be that
    of a dataset on the hub. Raises `UserError` where another run holds it."""
    root = Path(checkpoint_dir).expanduser()
    made: list[Path] = []
    held: list[int] = []

    def hold() -> None:
        if not held and root.is_dir():
            held.extend(_lock(root))

    def make_and_hold() -> None:
        if not held:
            made.extend(folder for folder in (root, *root.parents) if not folder.exists())
            held.extend(_lock(root))

    try:
        ranks.told(hold)
        yield lambda: ranks.told(make_and_hold)
    finally:
        for folder in made if ranks.first else ():  # an error before the run began leaves nothing behind
            with suppress(OSError):
                folder.rmdir()
        for descriptor in held:
            _let_go(descriptor)


def _lock(root: Path) -> list[int]:
    """The open lock; none where there cannot be one. What is wrong with the folder is said by who opens it."""
    until, others = time.monotonic() + LET_GO_S, 0
    while True:
        try:
            import fcntl

            root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        except (ImportError, OSError):
            return []
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.path.samestat(os.fstat(descriptor), os.stat(root))
            others += not same
            if same or others == MOST_OTHERS:
                return [descriptor]
            os.close(descriptor)  # whoever held it has removed the folder, and it has been made anew
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() >= until:
                raise UserError(
                    f"another run is writing into {root} at this moment. Wait for its end, or choose another folder: "
                    "checkpoint.checkpoint_dir=./another"
                ) from None
            time.sleep(0.1)
        except FileNotFoundError:  # or it has not been made yet
            os.close(descriptor)
        except OSError:  # a file system without locks
            os.close(descriptor)
            return []


def _let_go(descriptor: int) -> None:
    """For all who have it: workers that were forked from this process may live on, in a notebook for example."""
    import fcntl

    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
