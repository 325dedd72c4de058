"""How many ranks train, and why.

Whoever says a number gets it: torchrun, srun or mpirun by starting them, `--nproc-per-node`, `distributed.dp_size`.
Otherwise all visible GPUs are used, or as many of them as the config's layout and batch can be shared by; a run that is
resumed keeps the ranks it began with, so that its steps stay what they are. `dataloader.batch_size` is per rank, so a
step has more examples on more GPUs unless `global_batch_size` says otherwise.

`better_alone` is asked later, when the plan is made: nobody asked for several ranks, so none of them may stand in the
way of a run that one GPU can do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from automodel.config.errors import UserError
from automodel.distributed.layout import ranks_wanted
from automodel.distributed.world import World
from automodel.plan.config import RunConfig
from automodel.plan.layout import check_layout
from automodel.plan.plan import Plan


@dataclass(frozen=True)
class Ranks:
    """So many, for this reason."""

    count: int
    why: str = ""
    """In words, for the plan; nothing where it goes without saying."""
    automatic: bool = False
    """Whether nobody asked for several: then one will do where several will not."""


def choose_ranks(
    cfg: RunConfig, asked: int | None, world: World, visible_gpus: Callable[[], int], begun: int | None = None
) -> Ranks:
    """`asked`: `--nproc-per-node`. `begun`: the ranks of the run that is to be resumed. `visible_gpus` is called only
    where its answer matters."""
    if world.size > 1:
        if asked is not None and asked != world.local_size:
            raise UserError(
                f"--nproc-per-node is {asked}, but torchrun started {world.local_size} ranks on this machine already. "
                "Leave the option out."
            )
        return Ranks(world.size)
    if asked is not None:
        return Ranks(asked, f"--nproc-per-node {asked}")
    wanted = ranks_wanted(cfg.distributed)
    if cfg.distributed.dp_size is not None:
        return Ranks(wanted, "distributed: asks for them")
    if world.started_alone:
        return Ranks(wanted, "it was started as the only rank")
    gpus = visible_gpus()
    if gpus <= wanted:
        return Ranks(wanted)
    if begun is not None and begun <= gpus and begun % wanted == 0:
        return Ranks(begun, f"the run began with {begun}")
    if cfg.compares_first and wanted == 1:
        return Ranks(1, "provider: huggingface and benchmark: compare with stock Trainer, on one GPU")
    return _as_many_as_can_share(cfg, gpus, wanted)


def _as_many_as_can_share(cfg: RunConfig, gpus: int, wanted: int) -> Ranks:
    """All GPUs, or the most that the layout and the batch allow. `wanted`: what the layout needs at least."""
    obstacle = ""
    for count in range(gpus // wanted * wanted, wanted, -wanted):
        try:
            check_layout(cfg, count)
        except UserError as error:
            obstacle = obstacle or in_one_line(error)
            continue
        if count == gpus:
            return Ranks(count, f"all {gpus} visible GPUs (--nproc-per-node 1 for one)", automatic=True)
        why = obstacle or f"the layout takes a multiple of {wanted}"
        return Ranks(count, f"of {gpus} visible GPUs: {why}", automatic=True)
    return Ranks(wanted, obstacle or f"the layout takes a multiple of {wanted}")


def better_alone(cfg: RunConfig, plan: Plan, rows: int, data_ranks: int) -> str | None:
    """Why fewer ranks do better than those of this plan, in words; None where they do not. `rows`: examples of an
    epoch. `data_ranks`: ranks that have documents of their own."""
    if rows < data_ranks:
        return f"{rows} example{'s' if rows > 1 else ''} cannot be shared by {data_ranks} ranks"
    grows = not cfg.step_scheduler.global_batch_size and plan.packed_sequence_size == 0
    if grows and plan.global_batch_size > rows:
        step = f"{plan.micro_batch_size} × {plan.grad_acc_steps} × {data_ranks} examples"
        return (
            f"a step of {step} on {data_ranks} GPUs would be more than the {rows} there are; "
            "step_scheduler.global_batch_size fixes a smaller one"
        )
    return None


def in_one_line(error: UserError) -> str:
    """An error as a plan's reason."""
    return " ".join(line.strip() for line in str(error).splitlines()).rstrip(".")
