"""A hung collective, reported with the rank and the call.

Ranks meet in calls that wait for all of them. When one stays away, the others wait, and nothing says for whom. So every
rank counts its calls, and a thread of its own tells the group's store every few seconds which one it is in, and at what
line of code. A rank that waits longer than `patience` looks up where the others are, and says who is missing and what
that one does instead. Inside a step torch makes calls of its own (a layer's weights are gathered, gradients leave), so
a step counts as one call: where all ranks are in the same one for so long, each one's line says which of them hangs.

Waiting can be right: the first rank tokenises, evaluates or exports alone, and its thread says so. A rank whose thread
says nothing any more (stopped, its machine gone) is not coming back: then the job ends, so that whoever started it can
start it again. The store itself lives in the process that started the ranks, or in the first rank's: where it is gone,
so is the job, and a rank that was just connecting to others would wait for hours.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

from automodel.config.errors import EXIT_FAILED
from automodel.distributed.farewell import FAREWELL

PATIENCE = "AUTOMODEL_HANG_SECONDS"
DEFAULT_PATIENCE = 300.0


def patience_of_environment() -> float:
    """Seconds after which waiting is reported; `AUTOMODEL_HANG_SECONDS`."""
    try:
        return max(0.5, float(os.environ[PATIENCE]))
    except (KeyError, ValueError):
        return DEFAULT_PATIENCE


@dataclass
class Position:
    """Where a rank is."""

    call: int = 0
    """Calls that it has begun."""
    doing: str = ""
    """What the call is for; nothing between two calls."""
    since: float = field(default_factory=time.monotonic)
    """When that began, by this rank's own clock."""
    beat: int = 0
    """How often it has told others."""
    where: str = ""
    """The line of code it is at."""


def _leave() -> NoReturn:
    os._exit(EXIT_FAILED)


class Watch:
    """Watches the calls of this rank. `store`: a torch store of its own, that no other thread uses."""

    def __init__(self, rank: int, size: int, store: Any, patience: float | None = None):
        self.rank, self.size, self.store = rank, size, store
        self.patience = patience_of_environment() if patience is None else patience
        self.tick = min(5.0, self.patience / 4)
        self.here = Position()
        self.say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
        self.leave: Callable[[], Any] = _leave
        self._seen: dict[int, tuple[int, float]] = {}
        self._ended = threading.Event()
        self._said, self._said_of_all = -1, False
        self._watched = threading.get_ident()
        with suppress(AttributeError, RuntimeError):
            store.set_timeout(timedelta(seconds=max(1.0, self.patience)))
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        atexit.register(self.end)  # also where an error ends this rank

    @contextmanager
    def call(self, doing: str) -> Generator[None]:
        """A call that waits for other ranks; it may be made of such calls."""
        around = self.here.doing
        self.here.call += 1
        self.here.since = time.monotonic()
        self.here.doing = doing
        try:
            yield
        finally:
            self.here.doing, self.here.since = around, time.monotonic()

    def end(self) -> None:
        """Returns when the thread has: it must not come back from the store while Python ends (`farewell.py`)."""
        atexit.unregister(self.end)
        self._ended.set()
        self._thread.join(FAREWELL)

    def _run(self) -> None:
        while not self._ended.wait(self.tick):
            try:
                self._tell()
                idle = time.monotonic() - self.here.since
                if idle > self.patience:
                    self._look_around(idle)
            except RuntimeError as error:
                if self._ended.wait(FAREWELL):
                    return
                first_line = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
                self._give_up(f"the first rank, or who started it, is gone ({first_line})")
                return

    def _tell(self) -> None:
        self.here.beat += 1
        self.here.where = line_of(self._watched)
        told = {name: getattr(self.here, name) for name in ("call", "doing", "beat", "where")}
        self.store.set(f"watch/{self.rank}", json.dumps(told))

    def _look_around(self, waited: float) -> None:
        """Says who is missing, once for each call and by the first rank that waits; ends where it is in vain. Between
        two calls this rank may be waiting as well, in one that torch makes (a layer that is gathered)."""
        late, silent, beside = [], [], []
        for rank in range(self.size):
            other = self._position_of(rank)
            if rank == self.rank:
                continue
            if self._silent_for(rank, other) > self.patience:
                silent.append(rank)
            if other is None or other.call < self.here.call:
                late.append(f"rank {rank} " + _in_words(other))
            elif other.call == self.here.call and other.doing:
                beside.append(f"rank {rank} is at {other.where}")
        call = self.here.call
        if silent:
            who = ", ".join(f"rank {rank}" for rank in silent)
            self._give_up(f"{who} gave no sign of life for {self.patience:.0f} s: stopped, or its machine is gone")
        elif late and self.here.doing and self._said != call:
            self._said = call
            if self.store.add(f"watch/said/{call}", 1) == 1:
                self.say(
                    f"warning: rank {self.rank} has waited {waited:.0f} s in call {call} ({self.here.doing}), at "
                    f"{self.here.where}. Not there yet: {'; '.join(late)}."
                )
        elif len(beside) == self.size - 1 and self.here.doing and not self._said_of_all:
            self._said_of_all = True
            if self.store.add("watch/said/all", 1) == 1:
                self.say(
                    f"warning: no rank has left call {call} ({self.here.doing}) for {waited:.0f} s: one of them hangs, "
                    f"or it takes so long. Rank {self.rank} is at {self.here.where}; {'; '.join(beside)}."
                )

    def _give_up(self, why: str) -> None:
        doing = self.here.doing or "working on its own"
        self.say(
            f"error: rank {self.rank} waited in vain in call {self.here.call} ({doing}): {why}. "
            "--resume continues from the last checkpoint."
        )
        self.leave()

    def _position_of(self, rank: int) -> Position | None:
        key = f"watch/{rank}"
        if not self.store.check([key]):
            return None
        return Position(**json.loads(self.store.get(key)))

    def _silent_for(self, rank: int, other: Position | None) -> float:
        """Seconds since this rank last saw the other one's count of beats change."""
        beat, now = (other.beat if other else -1), time.monotonic()
        if rank not in self._seen or self._seen[rank][0] != beat:
            self._seen[rank] = (beat, now)
        return now - self._seen[rank][1]


def line_of(thread: int) -> str:
    """Where a thread is: the function, and the line of somebody's own code that led there, if torch is in it."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end"
    name, own = frame.f_code.co_name, frame
    while own.f_back is not None and "site-packages" in own.f_code.co_filename:
        own = own.f_back
    place = f"{'/'.join(own.f_code.co_filename.split('/')[-2:])}:{own.f_lineno}"
    return f"{name} ({place})" if own is frame else f"{name}, called from {own.f_code.co_name} ({place})"


def _in_words(position: Position | None) -> str:
    if position is None:
        return "has not said anything yet"
    if position.doing:
        return f"is still in call {position.call} ({position.doing}), at {position.where}"
    return f"has done {position.call} calls and works on its own, at {position.where}"
