"""A GPU for every rank, also where each rank is shown only its own."""

from __future__ import annotations

import pytest

from automodel.config.errors import UserError
from automodel.distributed.own_gpu import claim_gpu, own_gpu
from automodel.distributed.world import World


class Store(dict):
    def add(self, key, value):
        self[key] = self.get(key, 0) + value
        return self[key]


def test_ranks_take_the_gpu_of_their_number():
    assert [own_gpu(World(rank, 8, rank % 4, 4), 4, {}) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_task_that_is_bound_to_one_gpu_calls_it_0():
    assert own_gpu(World(3, 4, 3, 4), 1, {"CUDA_VISIBLE_DEVICES": "0", "SLURM_PROCID": "3"}) == 0


@pytest.mark.parametrize(
    "environment",
    [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "0", "TORCHELASTIC_RUN_ID": "x"}],
)
def test_more_ranks_than_gpus_are_refused(environment):
    with pytest.raises(UserError, match="4 ranks were started on a machine with 1 GPU; .* Use --nproc-per-node 1"):
        own_gpu(World(3, 4, 3, 4), 1, environment)


def test_two_ranks_that_are_bound_to_the_same_gpu_are_told():
    store = Store()
    claim_gpu(store, "GPU-1", "a")
    claim_gpu(store, "GPU-2", "a")
    claim_gpu(store, "GPU-1", "b")
    with pytest.raises(UserError, match="two ranks of this machine see the same GPU"):
        claim_gpu(store, "GPU-1", "a")
