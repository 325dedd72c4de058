"""Ranks as real processes: torch's process group, with gloo on the CPU and NCCL between GPUs.

Gradients are summed once for each optimizer step, the first of them while the last are still being made
(`overlapped.py`).

Small things (counts, signals, metrics) go through gloo also where there are GPUs, so that no device waits for them.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel.config.errors import EXIT_FAILED, UserError
from automodel.distributed.farewell import wait_for_gloo
from automodel.distributed.overlapped import OverlappedSum
from automodel.distributed.own_gpu import claim_gpu, own_gpu
from automodel.distributed.watch import Watch, patience_of_environment
from automodel.distributed.world import Alone, World

T = TypeVar("T")

PATIENCE = timedelta(hours=12)
"""Ranks wait so long: the first tokenises a large dataset and evaluates alone. A rank that dies is noticed at once."""
MEETING = 30.0
"""Seconds in which ranks may come one after the other, at least: each imports torch first."""
LONGEST_TEXT = 400  # bytes that ranks tell each other


class LostRankError(UserError):
    """Another rank is gone, or cannot be reached."""

    exit_code = EXIT_FAILED


class Processes(Alone):
    """This process and its peers."""

    together = True

    def __init__(self, world: World):
        self.world = world
        gpus = torch.cuda.device_count()
        if gpus:
            torch.cuda.set_device(own_gpu(world, gpus))
        self._found = dist.is_initialized()
        self._sum: OverlappedSum | None = None
        with _in_words("meeting"):
            self._store = _existing_store() if self._found else _shared_store()
            # Before the ranks connect to each other: one that is killed meanwhile would be waited for, for hours.
            self._watch = Watch(world.rank, world.size, _own_connection(self._store))
        atexit.register(wait_for_gloo)  # whoever ends the group, and however this rank ends
        if not self._found:
            self._store.set_timeout(PATIENCE)  # only now: a second connection must not be tried for so long
            with self._together("meeting"):
                self._meet(gpus)

    def _meet(self, gpus: int) -> None:
        if 0 < gpus < self.world.local_size:  # each was shown one of its own
            claim_gpu(self._store, str(torch.cuda.get_device_properties().uuid))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpus else "gloo",
            store=self._store,
            rank=self.world.rank,
            world_size=self.world.size,
            timeout=PATIENCE,
        )

    def barrier(self) -> None:
        self.highest(0)  # NCCL's own barrier would wait for the device

    @contextmanager
    def ahead(self) -> Generator[None]:
        turn = 0 if self.first else 1 if self.world.local_rank == 0 else 2
        for _ in range(turn):
            self.barrier()
        yield
        for _ in range(turn, 2):
            self.barrier()

    def total(self, values: Sequence[float]) -> list[float]:
        summed = torch.tensor(values, dtype=torch.float64)
        with self._together("adding counts"):
            dist.all_reduce(summed)
        return summed.tolist()

    def highest(self, value: int) -> int:
        among = torch.tensor([value], dtype=torch.int64)
        with self._together("waiting for the others"):
            dist.all_reduce(among, op=dist.ReduceOp.MAX)
        return int(among)

    def told(self, make: Callable[[], T]) -> T:
        text = json.dumps(make()).encode() if self.first else b""
        length = self.highest(len(text))
        carried = torch.zeros(length, dtype=torch.uint8)
        if self.first:
            carried = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        with self._together("hearing from the first rank"):
            dist.broadcast(carried, src=0)
        return json.loads(carried.numpy().tobytes())

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._together("collecting"):
            dist.all_gather(found, tensor)
        return found

    def texts(self, text: str) -> list[str]:
        carried, data = torch.zeros(LONGEST_TEXT, dtype=torch.uint8), text.encode()[:LONGEST_TEXT]
        carried[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else carried[:0]
        return [bytes(found.tolist()).rstrip(b"\0").decode(errors="replace") for found in self.gathered(carried)]

    @torch.no_grad()
    def same_start(self, tensors: Sequence[Tensor]) -> None:
        with self._together("sharing the first weights"):
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                dist.broadcast(whole, src=0)
                if whole.data_ptr() != tensor.data_ptr():
                    tensor.copy_(whole)

    def last_micro_batch(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None) -> None:
        self._sum_of(parameters, dtype).arm()

    def sum_gradients(
        self, parameters: Sequence[nn.Parameter], loss: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        with self._together("adding gradients"):
            return self._sum_of(parameters, dtype).finish(loss)

    @torch.no_grad()
    def add_up(self, tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> None:
        with self._together("adding gradients"):
            for tensor in tensors:
                if dtype in (None, tensor.dtype):
                    dist.all_reduce(tensor)
                else:
                    summed = tensor.to(dtype)
                    dist.all_reduce(summed)
                    tensor.copy_(summed)

    def _sum_of(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> OverlappedSum:
        if self._sum is None or list(map(id, self._sum.parameters)) != list(map(id, parameters)):
            # Another run of the same process has other parameters.
            self._sum = OverlappedSum(parameters, self.told, dtype)
        return self._sum

    @contextmanager
    def in_step(self) -> Generator[None]:
        try:
            with self._watch.call("training a step"):
                yield
        except RuntimeError as error:
            if not _speaks_of_ranks(error):
                raise
            with _in_words("training a step"):
                raise

    def claims_failure(self) -> bool:
        try:
            return self._store.add("failed", 1) == 1
        except RuntimeError:  # the store went with the process that held it; whoever is left speaks
            return True

    def close(self) -> None:
        self._watch.end()
        if not self._found:  # whoever made it will end it
            dist.destroy_process_group()

    @contextmanager
    def _together(self, doing: str) -> Generator[None]:
        """A call that waits for the others; whoever waits too long says for whom (`watch.py`)."""
        with self._watch.call(doing), _in_words(doing):
            yield


def _own_connection(store: Any) -> Any:
    """For a thread of its own, where torch can: one that waits for an answer holds a connection."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):
        return store


def _shared_store() -> dist.Store:
    """Where all ranks have come to. Whoever is not there in twice the time that waiting may take is not coming."""
    soon = timedelta(seconds=max(MEETING, 2 * patience_of_environment()))
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=soon)))
    except RuntimeError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LostRankError(
            f"not all {os.environ.get('WORLD_SIZE')} ranks came to {place} within {soon.seconds} s. Were all of them "
            f"started, and can they reach that address? ({str(error).splitlines()[0][:120]})"
        ) from error
    return dist.PrefixStore(f"automodel/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _existing_store() -> dist.Store:
    """Of a process group that somebody else has made (Ray Train)."""
    return dist.PrefixStore("automodel", dist.distributed_c10d._get_default_store())


def _speaks_of_ranks(error: RuntimeError) -> bool:
    """Whether it is the process group that failed, and not a computation."""
    words = ("gloo", "NCCL", "Connection reset", "Connection closed", "Broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


@contextmanager
def _in_words(doing: str) -> Generator[None]:
    """What the process group throws, in words. Out of memory stays what it is."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LostRankError(
            f"another rank cannot be reached any more while {doing}; it ended or was killed. --resume continues from "
            f"the last checkpoint. ({first_line[:120]})"
        ) from error
