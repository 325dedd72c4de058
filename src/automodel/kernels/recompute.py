"""Whether a layer is being computed for the second time, for the sake of its backward pass.

The second time, results that only the next layer would read are not needed: the backward pass of a product reads its
inputs and its weight. A block may then leave out its last product, a quarter of a decoder layer's arithmetic. The
switch belongs to the thread, since backward passes run in threads of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager


class _Mode(threading.local):
    again = False


_mode = _Mode()


def computing_again() -> bool:
    """Whether what a layer gives will not be read."""
    return _mode.again


@contextmanager
def compute_again() -> Generator[None]:
    """Inside, a layer is computed for what its backward pass keeps, not for what it gives."""
    before, _mode.again = _mode.again, True
    try:
        yield
    finally:
        _mode.again = before
