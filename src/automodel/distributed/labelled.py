"""One log of all ranks: whole lines, and those of every rank but the first say whose they are.

The first rank speaks for all, so hardly anything comes from the others; what does (a warning of a library, a print of
somebody's dataset, an error) would run into the first one's lines and look like its own. Torch labels its own lines
and the traceback of a rank in the same form, and is left alone.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

LABELLED_ALREADY = "[rank"


class LabelledLines(io.TextIOBase):
    """Text that is written in pieces goes out in lines, each in one piece, with a label before it."""

    def __init__(self, stream: Any, label: str):
        self.stream, self.label, self._begun = stream, label, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        self._put(lines)
        return len(text)

    def _put(self, lines: list[str]) -> None:
        shown = [line.rpartition("\r")[2] for line in lines]  # of a progress bar, the last state
        out = [line if line.startswith(LABELLED_ALREADY) else self.label + line for line in shown]
        if out:
            self.stream.write("\n".join(out) + "\n")
            self.stream.flush()

    def flush(self) -> None:
        """Lines leave when they are whole; what is not stays."""

    def finish(self) -> None:
        """A last line without an end."""
        if self._begun:
            self._put([self._begun])
        self._begun = ""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.stream.fileno()


@contextmanager
def labelled_output(rank: int) -> Generator[None]:
    """What this rank prints inside the block is labelled, unless it is the first. After an error it stays so, for the
    traceback."""
    if rank == 0:
        yield
        return
    before = sys.stdout, sys.stderr
    lines = [LabelledLines(stream, f"[rank{rank}]: ") for stream in before]
    sys.stdout, sys.stderr = lines
    yield
    for stream in lines:
        stream.finish()
    sys.stdout, sys.stderr = before
