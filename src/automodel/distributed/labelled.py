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
        *lines, begun = (self._begun + text).split("\n")
        self._put(lines)
        self._begun = _last_state(begun) + "\r" * begun.endswith("\r")  # a long bar is not kept from its beginning on
        return len(text)

    def _put(self, lines: list[str]) -> None:
        shown = [_last_state(line) for line in lines]
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

    @property
    def encoding(self) -> str:  # ty: ignore[incompatible-property-override]
        return self.stream.encoding

    def __getattr__(self, name: str) -> Any:
        """Whatever else a script asks of its output (`buffer`, `reconfigure`)."""
        return getattr(self.stream, name)


def _last_state(line: str) -> str:
    """What a line shows in the end: a progress bar begins again and again."""
    return line.rstrip("\r").rpartition("\r")[2]


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
