"""Whether the weights below an adapter are still those that it was trained beside.

A checkpoint of an adapter holds nothing of its base, which is read again from where the config says: a folder that
another run may have written to since, or a name on the hub whose files were replaced. A few kilobytes out of every file
tell that apart as well as all of it would, since training changes every matrix.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from automodel.models.config import ModelConfig
from automodel.models.source import find_model

PLACES = 16
"""Of a file, at equal distances; the first has the names and shapes."""
BYTES = 4096


def sample_of(cfg: ModelConfig) -> str | None:
    """A hash over samples of a model's weights; none where they are not safetensors."""
    from safetensors import SafetensorError

    from automodel.models.streamed import stored_in

    try:
        stored = stored_in(find_model(cfg))
        return None if stored is None else _hash(sorted(set(stored.values())))
    except (OSError, ValueError, KeyError, SafetensorError):  # whoever loads them says what is wrong
        return None


def _hash(paths: list[Path]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for path in paths:
        size = path.stat().st_size
        total.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for place in range(PLACES):
                file.seek(max(0, size - BYTES) * place // (PLACES - 1))
                total.update(file.read(BYTES))
    return total.hexdigest()
