"""What has to be over before Python ends.

A thread that needs Python while Python ends is unwound by force (up to Python 3.13), and where it comes through C++
that aborts the process: a run that is done and saved would be reported as a crash. Gloo's threads are such ones: they
drop a call's tensors after whoever made the call has gone on, and a tensor's Python half goes with it. Ending the
process group joins them, but only where nothing holds the group any more; meshes and torch's caches of sharded
operations do. So a rank looks, in its last moment, whether they still work.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

FAREWELL = 3.0
"""Seconds in which a rank may still be ending by itself."""
GLOO = "pt_gloo_runloop"
LOOK_S = 0.002
LOOKS = 3
"""So often in a row nobody may be at work: a thread that is about to wait for a lock sleeps for a moment, too."""


def wait_for_gloo(threads: Path = Path("/proc/self/task")) -> None:
    """Returns when gloo's threads sleep, or after `FAREWELL`. Where the system does not say, at once."""
    until, quiet = time.monotonic() + FAREWELL, 0
    while quiet < LOOKS and time.monotonic() < until:
        states = _states(threads)
        if not states:
            return
        quiet = quiet + 1 if set(states) <= {"S"} else 0
        time.sleep(LOOK_S)  # and leaves Python to them


def _states(threads: Path) -> list[str]:
    """Of gloo's threads: S sleeps, R runs or would, D waits for a disk."""
    found = []
    for stat in threads.glob("*/stat"):
        with suppress(OSError):  # a thread that ended meanwhile
            name, _, rest = stat.read_text(errors="replace").partition("(")[2].rpartition(")")
            if name == GLOO:
                found.append(rest.split()[0])
    return found
