"""What the environment says about ranks, and one rank that needs nobody."""

from __future__ import annotations

import subprocess
import sys

import pytest

from automodel.config.errors import UserError
from automodel.distributed.world import ALONE, World, joined, world_of_environment

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def test_no_variables_are_one_process(environment):
    assert world_of_environment() == World()
    with joined() as ranks:
        assert ranks is ALONE
    environment(WORLD_SIZE="1", RANK="0")
    assert world_of_environment() == World(started_alone=True)
    with joined() as ranks:
        assert ranks is ALONE


def test_what_torchrun_sets(environment):
    environment(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", MASTER_ADDR="a", MASTER_PORT="1")
    assert world_of_environment() == World(5, 8, 1, 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "from 0 to 1"),
    ],
)
def test_half_an_environment_is_refused(environment, values, message):
    environment(**values)
    with pytest.raises(UserError, match=message):
        world_of_environment()


def test_one_rank_answers_itself():
    assert ALONE.first
    assert ALONE.total([1, 2.5]) == [1, 2.5]
    assert ALONE.highest(3) == 3
    assert ALONE.told(lambda: {"a": 1}) == {"a": 1}
    assert ALONE.claims_failure()


def test_one_rank_imports_nothing_of_several():
    code = (
        "import sys; from automodel.distributed.world import joined\n"
        "with joined() as ranks: assert ranks.size == 1\n"
        "print('torch' in sys.modules, 'automodel.distributed.processes' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_buckets_keep_order_dtype_and_size(monkeypatch):
    import torch

    from automodel.distributed import overlapped

    monkeypatch.setattr(overlapped, "BUCKET_BYTES", 64)
    sizes = [4, 4, 20, 4, 8, 9]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    parameters.append(torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)))
    found = [[p.numel() for p in bucket] for bucket in overlapped.buckets(parameters)]
    assert found == [[4, 4], [20], [4, 8], [9], [1]]
    assert list(overlapped.buckets([])) == []
