"""`report.html` while the run goes on: made by a thread at the first log line, and again from time to time.

The page costs some ten milliseconds, more for long runs. So it is made anew at most every `EVERY_S` seconds, and less
often where it takes longer: at most a hundredth of the time goes into it. The last page, with the summary, is written
by the run itself when this tracker has finished.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automodel.metrics.report import write_report

EVERY_S = 20.0
SHARE = 0.01
"""Of the time, that may go into pages."""


class LiveReport:
    """A tracker that keeps `report.html` up to date."""

    name = "report.html"

    def __init__(self, every_s: float = EVERY_S):
        self._every_s = every_s
        self._run_dir = Path()
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._error: Exception | None = None

    def start(self, run_dir: Path, config: dict[str, Any], plan: dict[str, Any]) -> None:
        self._run_dir = run_dir

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        if self._error is not None:  # the run says so once, and goes on without
            raise self._error
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="report", daemon=True)
            self._thread.start()

    def finish(self, summary: dict[str, Any]) -> None:
        self._ended.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        while self._changed.wait() and not self._ended.is_set():
            self._changed.clear()
            began = time.perf_counter()
            try:
                write_report(self._run_dir, running=True)
            except Exception as error:  # a full disk, or a line that the page cannot show
                self._error = error
                return
            self._ended.wait(max(self._every_s, (time.perf_counter() - began) / SHARE))
