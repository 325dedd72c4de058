"""Turning rows into samples, in parallel and in order.

An `Encoder` knows one layout of one task (classify.py, language.py, sequences.py, ready.py). It sees a slice of rows
as lists and writes samples, or rejects rows with a reason. It must be a pure function of its rows: slices are encoded
by several processes, and their results are joined in the order of the rows, so the result never depends on how many
processes there were.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Protocol

from automodel.data.samples import Samples, SampleWriter

ROWS_PER_CHUNK = 1000  # one tokenizer call each
ROWS_WORTH_A_POOL = 4000  # below this, starting processes costs more than it saves


class Encoder(Protocol):
    """One layout of one task."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads."""
        ...

    def encode(self, rows: dict[str, list], first: int, out: SampleWriter) -> None:
        """Encode a slice whose first row has the number `first`."""
        ...


def encode_rows(dataset: Any, encoder: Encoder, num_proc: int | None = None) -> Iterator[Samples]:
    """The samples of all rows, chunk by chunk, in the order of the rows."""
    chosen = dataset.select_columns(list(encoder.columns))
    starts = range(0, len(chosen), ROWS_PER_CHUNK)
    processes = min(_processes(len(chosen), num_proc), len(starts))
    if processes <= 1:
        for start in starts:
            yield _encode_slice(chosen, encoder, start)
        return
    # Fork: the mapped table and the tokenizer are there at once, and nothing is pickled but the finished arrays.
    context = multiprocessing.get_context("fork")
    with _parallel_tokenizers_off(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        with ProcessPoolExecutor(processes, context, initializer=_adopt, initargs=(chosen, encoder)) as pool:
            yield from pool.map(_encode_in_worker, starts)


def _processes(rows: int, num_proc: int | None) -> int:
    if "fork" not in multiprocessing.get_all_start_methods():
        return 1
    if num_proc is not None:
        return max(1, num_proc)
    if rows < ROWS_WORTH_A_POOL:
        return 1
    with contextlib.suppress(AttributeError):
        return min(len(os.sched_getaffinity(0)), math.ceil(rows / ROWS_PER_CHUNK))
    return os.cpu_count() or 1


def _encode_slice(dataset: Any, encoder: Encoder, start: int) -> Samples:
    out = SampleWriter()
    encoder.encode(dataset[start : start + ROWS_PER_CHUNK], start, out)
    return out.finish()


_job: tuple[Any, Encoder] | None = None  # in a worker: what it was forked with


def _adopt(dataset: Any, encoder: Encoder) -> None:
    global _job
    _job = (dataset, encoder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    if sys.platform == "linux":
        # A pool worker waits for work for ever, so it must not outlive a parent that was killed (PR_SET_PDEATHSIG).
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _encode_in_worker(start: int) -> Samples:
    assert _job is not None
    return _encode_slice(*_job, start)


@contextlib.contextmanager
def _parallel_tokenizers_off() -> Generator[None]:
    """Processes are the parallelism here; threads inside each of them would fight over the same cores."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
