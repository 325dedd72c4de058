"""SIGTERM, SIGINT and SIGUSR1 ask for a clean stop: the current step ends, the state is saved, the process exits.

SIGUSR1 is what batch systems send some minutes before the time is up (`automodel launch slurm`). A second signal means
now: the previous handlers are back by then, so it ends the process as usual. When training is over there is nothing to
stop, and the first signal is waited out: checkpoint, model and report are written, and the run has finished.

Ranks get their signals one after the other. One of them may have agreed to stop before its own comes, which is then
still the first one, and must not end it while it saves or leaves: it is waited for beyond the context.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from automodel.distributed.world import Alone


class StopRequest:
    """A context in which the first signal only sets `requested`."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))

    def __init__(self):
        self.requested: str | None = None
        self.writing = False
        """Whether training is over, and the end takes as long as it takes: whoever presses Ctrl-C is told."""
        self._to_come = False
        """Whether another rank was asked to stop, and this one's own signal is still on its way."""
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        # Only the main thread may set handlers; a run inside a notebook's thread keeps the host's.
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._to_come or self.requested:
            self._restore()

    def agreed(self, ranks: Alone) -> str | None:
        """The signal that any rank got. All of them ask after the same step, so all stop there."""
        number = ranks.highest(signal.Signals[self.requested] if self.requested else 0)
        self._to_come = bool(number) and self.requested is None
        return signal.Signals(number).name if number else None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        self._restore()
        if self.writing:  # not by print, which may be what was interrupted
            told = f"\n{self.requested}: training is over, and its results are being written. Once more ends at once.\n"
            os.write(2, told.encode())

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # ty: ignore[invalid-argument-type]
        self._previous = {}
