"""Which GPU is this rank's.

As a rule every rank of a machine sees all of its GPUs and takes the one with its own number. Slurm can bind tasks to
GPUs (`--gpus-per-task`, `--gpu-bind`), and wrapper scripts of mpirun often do: then each rank sees one, and calls it 0.
Whether those are different ones nobody says, so the ranks tell each other the identities of theirs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from automodel.config.errors import UserError
from automodel.distributed.world import World


def own_gpu(world: World, gpus: int, environment: Mapping[str, str] = os.environ) -> int:
    """The number of this rank's GPU among the `gpus` it sees. Raises `UserError` where it has none of its own."""
    if world.local_rank < gpus:
        return world.local_rank
    if gpus == 1 and _bound(environment):
        return 0
    raise UserError(
        f"{world.local_size} ranks were started on a machine with {gpus} GPU{'s' if gpus > 1 else ''}; "
        f"each needs its own. Use --nproc-per-node {gpus}."
    )


def _bound(environment: Mapping[str, str]) -> bool:
    """Whether somebody else than torchrun, who never does, chose one GPU for this very process."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return len(chosen) == 1 and chosen[0].strip() not in ("", "-1") and "TORCHELASTIC_RUN_ID" not in environment


def claim_gpu(store: Any, identity: str, host: str | None = None) -> None:
    """Raises `UserError` where another rank of this machine has the same GPU. `store`: one that all ranks share."""
    if store.add(f"gpu/{host or socket.gethostname()}/{identity}", 1) > 1:
        raise UserError(
            "two ranks of this machine see the same GPU and no other. Give every rank one of its own (srun "
            "--gpus-per-task=1), or let all of them see all GPUs."
        )
