"""Whether the weights below an adapter are still those that it was trained beside.

A checkpoint of an adapter holds nothing of its base, which is read again from where the config says: a folder that
another run may have written to since, or a name on the hub whose files were replaced. A few kilobytes out of every
tensor tell that apart as well as all of it would: whoever trains changes whole matrices, though perhaps only some of
them (an adapter of queries and values that was merged into the base). Single rows that somebody edited are not seen.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from automodel.models.config import ModelConfig
from automodel.models.source import find_model

PLACES, BYTES = 4, 1024
"""Of a tensor, at equal distances."""
MOST_READS = 20_000
"""Thousands of experts are sampled in fewer places each."""
LARGEST_HEADER = 100_000_000
"""Bytes: what the safetensors library itself allows."""
FORM = "tensors-"
"""Begins what is told of every tensor; earlier versions looked at files."""


def sample_of(cfg: ModelConfig) -> str | None:
    """A hash over samples of a model's weights; none where they are not safetensors."""
    from safetensors import SafetensorError

    from automodel.models.streamed import stored_in

    source = find_model(cfg)  # outside: what is wrong with the name is an error of its own
    try:
        stored = stored_in(source)
        return None if stored is None else _hash(sorted(set(stored.values())))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError):
        return None  # the file is damaged, as loading the model says


def known(sample: str | None) -> str | None:
    """A sample that can be compared with one of now."""
    return sample if sample is not None and sample.startswith(FORM) else None


def _hash(paths: list[Path]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")  # of the header: names, dtypes, shapes and places
            size = path.stat().st_size
            if length > min(size, LARGEST_HEADER):
                raise ValueError("the header is longer than the file")
            header = file.read(length)
            total.update(header)
            spans = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
            if any(not 0 <= begin <= end <= size for begin, end in spans):
                raise ValueError("a tensor lies outside of the file")
            places = max(1, min(PLACES, MOST_READS // max(1, len(spans))))
            for begin, end in spans:
                for place in range(places):
                    file.seek(8 + length + begin + max(0, end - begin - BYTES) * place // max(1, places - 1))
                    total.update(file.read(min(BYTES, end - begin)))
    return FORM + total.hexdigest()
