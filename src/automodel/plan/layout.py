"""Whether so many ranks can train what the config asks for; found out before any of them is started."""

from __future__ import annotations

from automodel.config.errors import NotYetError, UserError
from automodel.distributed.world import World
from automodel.plan.asked import decide_batch
from automodel.plan.check import not_yet
from automodel.plan.config import RunConfig


def ranks_of(cfg: RunConfig, asked: int | None, world: World) -> int:
    """How many ranks train: those that torchrun started, or `--nproc-per-node`, or `distributed.dp_size`."""
    if world.size > 1:
        if asked is not None and asked != world.local_size:
            raise UserError(
                f"--nproc-per-node is {asked}, but torchrun started {world.local_size} ranks on this machine already. "
                "Leave the option out."
            )
        return world.size
    return asked or cfg.distributed.dp_size or 1


def check_layout(cfg: RunConfig, ranks: int) -> None:
    """Raises `NotYetError` for what is not built, and `UserError` for what cannot be shared by so many ranks."""
    unbuilt = not_yet(cfg, ranks)
    if unbuilt:
        raise NotYetError("the config asks for what is not yet built\n" + "\n".join(f"  {p}" for p in unbuilt))
    size = cfg.distributed.dp_size
    if size is not None and size != ranks:
        started = f"{ranks} rank{'s are' if ranks > 1 else ' is'} started"
        raise UserError(
            f"distributed.dp_size is {size}, but {started}. The nearest possible: dp_size: {ranks} (or none), or "
            f"--nproc-per-node {size}."
        )
    decide_batch(cfg, [], ranks)


def check_gpus(ranks: int, gpus: int) -> None:
    """Every rank needs a GPU of its own, where there are any."""
    if gpus and ranks > gpus:
        raise UserError(
            f"{ranks} ranks need {ranks} GPUs, and this machine has {gpus}. The nearest possible: "
            f"--nproc-per-node {gpus}."
        )
