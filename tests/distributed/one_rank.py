"""One rank of a small exercise; `python one_rank.py talk|fail`, under torchrun."""

from __future__ import annotations

import sys

import torch
from torch import nn

from automodel.distributed.world import joined


def talk() -> None:
    """Everything ranks can ask each other."""
    with joined() as ranks:
        rank, size = ranks.rank, ranks.size
        everyone = list(range(size))
        assert ranks.total([1, rank, 0.5]) == [size, sum(everyone), size / 2]
        assert ranks.highest(10 * rank) == 10 * (size - 1)
        assert ranks.told(lambda: {"from": rank, "value": float("inf")}) == {"from": 0, "value": float("inf")}
        assert [int(t) for t in ranks.gathered(torch.tensor([rank]))] == everyone
        start = torch.full((3, 2), float(rank)).t()  # not contiguous
        ranks.same_start([start])
        assert (start == 0).all()
        with ranks.ahead():
            pass
        shapes = [(3, 2), (4,), (2, 2), (5,)]
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        parameters[0].grad = torch.full(shapes[0], 1.0 + rank)
        if rank == 0:
            parameters[1].grad = torch.arange(4.0)  # only this rank has one
        parameters[3].grad = torch.full(shapes[3], float(rank))
        loss = ranks.sum_gradients(parameters, torch.tensor(1.0 + rank))
        expected = float(sum(everyone) + size)
        assert float(loss) == expected
        assert (parameters[0].grad == expected).all()
        assert parameters[1].grad.tolist() == [0, 1, 2, 3]
        assert parameters[2].grad is None  # nobody had one
        assert (parameters[3].grad == sum(everyone)).all()
        print("talked", flush=True)


def fail() -> None:
    """The same mistake on every rank."""
    with joined():
        raise KeyError("boom")


if __name__ == "__main__":
    {"talk": talk, "fail": fail}[sys.argv[1]]()
