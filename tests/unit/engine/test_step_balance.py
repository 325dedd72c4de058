"""Ranks sum for the balance loss only where a model has one: any other collective would meet another rank's."""

import pytest
import torch

from automodel.engine.step_balance import StepBalance


class Ranks:
    """Two ranks, of which the other has three micro-batches; counts what is summed."""

    together = True

    def __init__(self):
        self.sums = 0

    def highest(self, number):
        return max(number, 3)

    def add_up(self, tensors):
        self.sums += 1


@pytest.mark.parametrize(("sizes", "own", "sums"), [((), 2, 0), ((), 0, 0), ((4,), 2, 3), ((4, 8), 0, 3)])
def test_a_rank_sums_as_often_as_the_others(sizes, own, sums):
    ranks = Ranks()
    balance = StepBalance(sizes, ranks, own, labels=8.0, tokens=8.0, device="cpu")  # ty: ignore[invalid-argument-type]
    for _ in range(own):
        balance.weighed(torch.zeros(2, 3), tokens=4)
    balance.finish()
    assert ranks.sums == sums
