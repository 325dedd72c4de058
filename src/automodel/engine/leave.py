"""Ending a process without taking it apart.

When a Python process ends, the interpreter destroys every module and object, and torch its CUDA state: more than a
second after a run, in which nothing is left to do, since files are closed and the system frees memory faster.
`leave` does what an ending owes to others (threads finish, exit functions run, output is flushed) and stops there.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Ends the process with this exit code, from its main thread. For commands: nothing after it is run."""
    with suppress(ValueError):  # not the main thread, which alone may set handlers
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending already
        if code == 0:  # nobody should read of finished work that it was ended by SIGTERM
            for name in {"SIGTERM", "SIGUSR1"} & {known.name for known in signal.Signals}:
                signal.signal(signal.Signals[name], signal.SIG_IGN)
    threading._shutdown()  # ty: ignore[missing-attribute]  # as Python does: waits for threads, a checkpoint's too
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed by whoever read it, or not there
            stream.flush()
    os._exit(code)
