"""How many processes train together, and which one this is: read from the environment that torchrun sets.

`joined()` is the way in. One process: `ALONE`, an object that answers every question of several ranks at once, and
nothing of torch's distributed package is imported. Several: the process group of `processes.py`, which answers the same
questions by talking. Whoever asks does not have to know which it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from automodel.config.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from automodel.distributed.labelled import labelled_output
from automodel.distributed.started_by import as_the_only_rank, in_torchruns_words

if TYPE_CHECKING:
    from torch import Tensor, nn

    from automodel.distributed.processes import Processes

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The place of this process among those that were started together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Ranks on this machine."""
    started_alone: bool = False
    """Whether torchrun or mpirun started this one process and no other."""


def world_of_environment() -> World:
    """What torchrun says, or srun or mpirun in other words. No variables: one process."""
    os.environ.update(in_torchruns_words(os.environ))
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        return World(started_alone=as_the_only_rank(os.environ))
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"WORLD_SIZE is {size} in the environment, but {', '.join(missing)} is not set, so the ranks cannot find "
            "each other. Start with torchrun or --nproc-per-node, or unset WORLD_SIZE to train in one process."
        )
    rank = _number("RANK", 0)
    if rank >= size:
        raise UserError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks are counted from 0 to {size - 1}.")
    return World(rank, size, _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", size))


def was_restarted() -> bool:
    """Whether torchrun starts these ranks a second time, after others failed (`torchrun --max-restarts`)."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0) > 0


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if not text:
        return default
    if not text.isdigit():
        raise UserError(f"{name} is '{text}' in the environment; a whole number is expected there.")
    return int(text)


class Alone:
    """One rank, which has nobody to ask."""

    world = World()
    together = False
    """Whether there is a group to talk to."""

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def first(self) -> bool:
        """Whether this rank writes and speaks for all."""
        return self.rank == 0

    def barrier(self) -> None:
        """Returns when every rank is here."""

    @contextmanager
    def ahead(self) -> Generator[None]:
        """The first rank runs the block, then the first of every other machine, then all: they find what one of them
        left in a cache, also where every machine has its own."""
        yield

    def total(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks. On the host: no device waits for it."""
        return list(values)

    def highest(self, value: int) -> int:
        """The highest of the ranks' values."""
        return value

    def told(self, make: Callable[[], T]) -> T:
        """What `make` gives on the first rank, which alone calls it; a value that JSON can carry."""
        return make()

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """A tensor of every rank, all of one shape, in the host's memory."""
        return [tensor]

    def texts(self, text: str) -> list[str]:
        """A short text of every rank, in their order."""
        return [text]

    def same_start(self, tensors: Sequence[Tensor]) -> None:
        """Gives every rank the tensors of the first."""

    def last_micro_batch(self, parameters: Sequence[nn.Parameter], dtype: Any = None) -> None:
        """The backward pass that follows is the step's last: gradients may leave as they come."""

    @contextmanager
    def in_step(self) -> Generator[None]:
        """What goes wrong between ranks inside the block, in words."""
        yield

    def sum_gradients(self, parameters: Sequence[nn.Parameter], loss: Tensor, dtype: Any = None) -> Tensor:
        """Leaves in `.grad` the sum of all ranks' gradients, and returns the sum of their losses. `dtype`: what
        gradients are summed in; none: their own."""
        return loss

    def add_up(self, tensors: Iterable[Tensor], dtype: Any = None) -> None:
        """Each tensor becomes the sum of all ranks' tensors, in place and in this order. `dtype`: what is summed in;
        none: the tensor's own. On a GPU nobody waits but the current stream."""
        for _ in tensors:
            pass

    def claims_failure(self) -> bool:
        """Whether this rank is the first to fail, and so the one that says why."""
        return True

    def close(self) -> None:
        """Leaves the group."""


ALONE = Alone()


@contextmanager
def joined() -> Generator[Alone]:
    """The ranks that this process trains with, for the length of the block. An error is told by the first rank that has
    one; the others, which fail in the same way or because it is gone, end with its exit code and say nothing."""
    world = world_of_environment()
    if world.size == 1:
        yield ALONE
        return
    from automodel.distributed.processes import Processes

    with labelled_output(world.rank):
        ranks = Processes(world)
        yield from _until_all_are_done(ranks)


def _until_all_are_done(ranks: Processes) -> Generator[Alone]:
    world = ranks.world
    try:
        yield ranks
        ranks.barrier()  # whoever left early would be taken for lost while the first rank still exports
    except BaseException as error:
        if not ranks.claims_failure():
            raise SystemExit(_exit_code(error)) from None
        error.add_note(f"(rank {world.rank} of {world.size})")
        raise
    ranks.close()


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    code: Any = getattr(error, "exit_code", None) or getattr(error, "code", None)
    return code if isinstance(code, int) else EXIT_FAILED
