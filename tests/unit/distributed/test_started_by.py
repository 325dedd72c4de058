"""srun's and mpirun's variables, in torchrun's words."""

from __future__ import annotations

import pytest

from automodel.config.errors import UserError
from automodel.distributed.started_by import first_host, in_torchruns_words
from automodel.distributed.world import World, world_of_environment

SRUN = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "41234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[03-05,09],login1", "node03"),
        ("rack2-n[7,9]", "rack2-n7"),
        ("a1,b[2-3]", "a1"),
        ("n[1-2].cluster.example", "n1.cluster.example"),
    ],
)
def test_the_first_host_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


def test_srun(monkeypatch):
    words = in_torchruns_words(SRUN)
    assert words == {
        "WORLD_SIZE": "8",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "21234",
    }
    for name in words:
        monkeypatch.delenv(name, raising=False)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        patch.setattr("os.environ", dict(SRUN))
        assert world_of_environment() == World(5, 8, 1, 4)


def test_a_batch_jobs_shell_and_torchrun_are_left_alone():
    shell = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    assert in_torchruns_words(shell) == {}
    assert in_torchruns_words({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) == {}
    assert in_torchruns_words({**SRUN, "WORLD_SIZE": "2"}) == {}
    assert in_torchruns_words({}) == {}


def test_mpirun():
    words = in_torchruns_words(OPEN_MPI)
    assert (words["RANK"], words["WORLD_SIZE"], words["MASTER_ADDR"]) == ("3", "4", "127.0.0.1")
    assert 20_000 <= int(words["MASTER_PORT"]) < 40_000
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        in_torchruns_words(several)
    assert in_torchruns_words({**several, "MASTER_ADDR": "node1"})["MASTER_ADDR"] == "node1"
    mpich = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert in_torchruns_words(mpich)["LOCAL_RANK"] == "1"
