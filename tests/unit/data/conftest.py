"""Small stores with known content, shared by the data room's tests."""

from __future__ import annotations

import numpy as np
import pytest

from automodel.data.batch import IGNORE
from automodel.data.samples import SampleWriter
from automodel.data.store import TokenStore


def make_store(task: str, count: int = 23, seed: int = 0, longest: int = 17, pairs: bool = False) -> TokenStore:
    """Random documents of 2..longest tokens with the labels of the task."""
    random = np.random.default_rng(seed)
    writer = SampleWriter()
    for row in range(count):
        length = int(random.integers(2, longest + 1))
        ids = random.integers(1, 100, length)
        parts: dict = {}
        if pairs:
            parts["token_types"] = (np.arange(length) >= length // 2).astype(np.uint8)
        if task == "text-classification":
            parts["label"] = int(random.integers(0, 3))
        elif task == "multi-label":
            parts["label"] = [float(x) for x in random.integers(0, 2, 4)]
        elif task == "seq2seq":
            parts["target_ids"] = random.integers(1, 100, int(random.integers(1, 6)))
        elif task == "causal-lm":
            labels = ids.copy()
            labels[: int(random.integers(0, length - 1))] = IGNORE
            parts["token_labels"] = labels
        else:
            parts["token_labels"] = np.where(random.random(length) < 0.5, IGNORE, random.integers(0, 5, length))
            parts["token_labels"][0] = 1
        writer.add(row, ids, **parts)
    return TokenStore.in_memory(writer.finish())


@pytest.fixture
def store_of():
    return make_store
