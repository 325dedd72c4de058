"""Who started these ranks: torchrun, srun or mpirun, each with variables of its own. Torch reads torchrun's, so those
of the others are said in its words.

srun counts only where it started this very step with several tasks: the shell of a batch job has Slurm's variables as
well, and is one process. Ranks meet at the first node; where mpirun spans several machines it does not say which one
that is, and MASTER_ADDR has to.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from automodel.config.errors import UserError

SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Open MPI, and MPICH with its relatives: size, rank, rank and size on this machine."""
FIRST_PORT, PORTS = 20_000, 20_000


def in_torchruns_words(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would have set; nothing where it did, or where this is one process."""
    if "WORLD_SIZE" in environment:
        return {}
    if _several(environment, SLURM[0]) and all(name in environment for name in SLURM):
        return _of_srun(environment)
    for names in MPI:
        if _several(environment, names[0]) and names[1] in environment:
            return _of_mpirun(environment, *names)
    return {}


def as_the_only_rank(environment: Mapping[str, str]) -> bool:
    """Whether torchrun or mpirun started this one process. One task of srun says nothing: a shell that was asked for
    with `srun --pty` is one, too, and the GPUs that it sees are those it was given."""
    mpi = any(names[0] in environment for names in MPI) and "SLURM_PROCID" not in environment
    return mpi or "WORLD_SIZE" in environment


def _of_srun(environment: Mapping[str, str]) -> dict[str, str]:
    size = environment["SLURM_STEP_NUM_TASKS"]
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", size).split(",")[0].split("(")[0]
    job = int(environment.get("SLURM_JOB_ID", "0"))
    return {
        "WORLD_SIZE": size,
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": per_node,
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + job % PORTS),
    }


def _of_mpirun(
    environment: Mapping[str, str], size: str, rank: str, local_rank: str, local_size: str
) -> dict[str, str]:
    here = environment.get(local_size, environment[size])
    address = environment.get("MASTER_ADDR") or ("127.0.0.1" if here == environment[size] else "")
    if not address:
        raise UserError(
            f"mpirun started {environment[size]} ranks on several machines, and MASTER_ADDR is not set: give the name "
            "of the first machine, mpirun -x MASTER_ADDR=node1 …"
        )
    name = environment.get("PMIX_NAMESPACE") or environment.get("PMI_JOBID") or ""
    return {
        "WORLD_SIZE": environment[size],
        "RANK": environment[rank],
        "LOCAL_RANK": environment.get(local_rank, environment[rank]),
        "LOCAL_WORLD_SIZE": here,
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + zlib.crc32(name.encode()) % PORTS),
    }


def first_host(nodes: str) -> str:
    """The first of Slurm's list: `node[03-05,09],login1` → `node03`."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return nodes.split(",")[0]
    inside, _, after = rest.partition("]")
    suffix = after.split(",")[0]
    return prefix + inside.replace("-", ",").split(",")[0] + suffix


def _several(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "")
    return text.isdigit() and int(text) > 1
