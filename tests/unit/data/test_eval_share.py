"""Ranks share an evaluation: every batch once, and all ranks equally often."""

from __future__ import annotations

import numpy as np
import pytest

from automodel.data.loader import EvalLoader


@pytest.mark.parametrize("of", [1, 2, 3, 4, 9])
def test_every_batch_once(of):
    loader = EvalLoader(lambda chosen: list(chosen), lengths=np.arange(1, 15), batch_size=2)
    shares = [loader.share(own, of) for own in range(of)]
    counted = sorted(int(i) for part, mine in shares for batch in part.batches[:mine] for i in batch)
    assert counted == list(range(14))
    assert len({len(part.batches) for part, _ in shares}) == 1
    assert len(loader.batches) == 7
