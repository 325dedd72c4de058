"""What a person sees while a run starts: nothing is silent for ten seconds.

Imports, reading and tokenising the data, loading the weights and the first steps may each take seconds or minutes. On a
terminal a spinner with a clock says which of them is going on. Elsewhere each begins with a line of its own, and as
long as it goes on, a line every ten seconds says so; after two minutes, every minute.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from automodel.metrics.progress import duration

if TYPE_CHECKING:
    from rich.console import Console

EVERY_S = 10.0
OFTEN_FOR_S = 120.0
SELDOM_S = 60.0


class Heartbeat:
    """Calls `say` with the seconds that have passed, again and again, until it is stopped."""

    def __init__(self, say: Callable[[float], None], every_s: float | None = None) -> None:
        self._say = say
        self._every_s = EVERY_S if every_s is None else every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        started = time.monotonic()
        while not self._stopped.wait(self._pause(time.monotonic() - started)):
            self._say(time.monotonic() - started)

    def _pause(self, passed: float) -> float:
        return self._every_s if passed < OFTEN_FOR_S else max(SELDOM_S, self._every_s)

    def stop(self) -> None:
        """Nothing is said any more, not even what was about to be."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()


def telling(what: str) -> Heartbeat:
    """Says on stderr, every ten seconds until it is stopped, that this goes on: for commands whose output is read by
    programs."""
    return Heartbeat(lambda passed: print(f"[INFO] {what} … {duration(passed)}", file=sys.stderr, flush=True))


class Waiting:
    """Says what a starting run is doing. `begins` names the next part; leaving the context ends the last one."""

    def __init__(self, console: Console, every_s: float | None = None) -> None:
        self._console = console
        self._every_s = every_s
        self._end: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.ends()

    def begins(self, what: str) -> None:
        """The part before is over, and this one begins: `Loading the weights`."""
        self.ends()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._end = self._spin(what)
            return
        self._tell(f"{what} …")
        self._end = Heartbeat(lambda passed: self._tell(f"{what} … {duration(passed)}"), self._every_s).stop

    def ends(self) -> None:
        """The part that goes on is over. What was drawn on the terminal is gone."""
        self._end()
        self._end = lambda: None

    def _tell(self, text: str) -> None:
        self._console.print(f"[INFO] {text}", markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def _spin(self, what: str) -> Callable[[], None]:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        spinner = Progress(*columns, console=self._console, transient=True, refresh_per_second=4)
        spinner.add_task(f"{what} …")
        spinner.start()
        return spinner.stop
