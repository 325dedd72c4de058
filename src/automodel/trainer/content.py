"""Whether something that a script holds is still what it was, without a copy of it.

Lists of rows, and what a dataset's class keeps its rows in, may be changed in place between two epochs. Their pickled
bytes are hashed on the way and kept nowhere: Python's own pickling walks through ten million numbers in half a second.
"""

from __future__ import annotations

import hashlib
import pickle
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

SMALL = 16
"""Tensors of so few numbers, labels mostly, are compared by them, too: a new one may lie where the old one was."""


class _Sink:
    """A file that only knows the hash of what was written."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)


class _Pickler(pickle.Pickler):
    """Tensors count their changes themselves. Of what has no content to speak of, it counts which object it is."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) and value.__module__ == "builtins":  # those that are named below
            return NotImplemented
        if isinstance(value, torch.Tensor):
            small = value.tolist() if value.numel() <= SMALL and value.device.type == "cpu" else None
            return tuple, ((id(value), value._version, value.data_ptr(), small),)
        if hasattr(value, "_fingerprint"):  # of `datasets`, which knows its own content
            return str, (value._fingerprint,)
        as_object = (torch.nn.Module, FunctionType, MethodType, ModuleType, type)
        if isinstance(value, as_object) or type(value).__module__.partition(".")[0] in ("transformers", "tokenizers"):
            inner = getattr(value, "data", None)  # a `BatchEncoding` has its columns there
            return (dict, (inner,)) if isinstance(inner, dict) else (int, (id(value),))
        return NotImplemented


def content_of(value: Any) -> bytes | None:
    """A hash of everything in it; None where that cannot be told."""
    sink = _Sink()
    pickler = _Pickler(sink, protocol=5)
    pickler.fast = True  # nothing is remembered: equal values of other objects give equal bytes
    try:
        pickler.dump(value)
    except Exception:  # an open file, a lock, something that contains itself: anybody's classes may be in it
        return None
    return sink.digest.digest()
