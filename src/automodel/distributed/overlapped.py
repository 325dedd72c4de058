"""Gradients that are on their way while the backward pass still makes the others (`ddp`).

torch's DistributedDataParallel does this too, but counts on every rank running forward and backward equally often; here
a rank may have had any number of micro-batches, none too. So the plan of a step is agreed on beforehand and does not
depend on it: which parameters learn, in which order their gradients come, and so which of them share a bucket. The
first step finds that out: the first rank tells the order it saw. From then on, in the backward pass of its last
micro-batch, a rank sends a bucket off as soon as all its gradients are there, always in the agreed order; what is left
at the end (everything, on a rank without documents) is sent then.

Which parameters have a gradient is asked in every step: one that has none anywhere must keep none, because an optimizer
leaves it alone then, and decays it otherwise. One that nobody expected is summed after the others, and expected from
then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 32 << 20


class OverlappedSum:
    """Sums the gradients of these parameters over all ranks, once a step."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        told: Callable[[Callable[[], list[int]]], list[int]],
        dtype: torch.dtype | None = None,
    ):
        """`told`: what the first rank says, on every rank. `dtype`: what is summed in; none: the gradients' own."""
        self.parameters, self._told, self.dtype = list(parameters), told, dtype
        self._buckets: list[list[int]] | None = None  # numbers of parameters; agreed on after the first step
        self._came: dict[int, None] = {}  # in this order
        self._armed, self._sent = False, 0
        self._have = [False] * len(self.parameters)
        self._under_way: list[tuple[list[int], Tensor, dist.Work]] = []
        for number, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))

    def arm(self) -> None:
        """The next backward pass is the last of this step."""
        self._armed, self._came = True, {}

    def _arrived(self, number: int, _: Tensor) -> None:
        if self._armed:
            self._came[number] = None
            while self._buckets and self._sent < len(self._buckets) and self._is_there(self._buckets[self._sent]):
                self._send(self._buckets[self._sent])

    def _is_there(self, bucket: list[int]) -> bool:
        return all(number in self._came for number in bucket)

    @torch.no_grad()
    def _send(self, bucket: list[int]) -> None:
        members = [self.parameters[number] for number in bucket]
        for number, parameter in zip(bucket, members, strict=True):
            self._have[number] = parameter.grad is not None
        flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in members])
        flat = flat if self.dtype is None else flat.to(self.dtype)
        for parameter in members:
            parameter.grad = None
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self._under_way.append((bucket, flat, work))
        self._sent += 1

    @torch.no_grad()
    def finish(self, loss: Tensor) -> Tensor:
        """Leaves the sums in `.grad`, and returns that of the losses."""
        self._armed = False
        known = self._buckets or []
        for bucket in known[self._sent :]:
            self._send(bucket)
        expected = {number for bucket in known for number in bucket}
        for number, parameter in enumerate(self.parameters):
            if number not in expected:
                self._have[number] = parameter.grad is not None
        have = torch.tensor(self._have, dtype=torch.uint8)
        dist.all_reduce(have, op=dist.ReduceOp.MAX)
        anywhere = [number for number, there in enumerate(have.tolist()) if there]
        new = [number for number in anywhere if number not in expected]
        if new:
            order = self._told(lambda: list(dict.fromkeys([*self._came, *reversed(range(len(self.parameters)))])))
            for bucket in self._filled([number for number in order if number in set(new)]):
                self._send(bucket)
            self._buckets = self._filled([n for n in order if n in expected or n in set(new)])
        total = loss.detach().clone().reshape(1)
        dist.all_reduce(total)
        self._hand_out(set(anywhere))
        return total[0]

    def _hand_out(self, anywhere: set[int]) -> None:
        for bucket, flat, work in self._under_way:
            work.wait()
            sizes = [self.parameters[number].numel() for number in bucket]
            for number, part in zip(bucket, flat.split(sizes), strict=True):
                parameter = self.parameters[number]
                parameter.grad = part.view(parameter.shape).to(parameter.dtype) if number in anywhere else None
        self._under_way, self._sent, self._came = [], 0, {}

    def _filled(self, order: Sequence[int]) -> list[list[int]]:
        numbers = {id(self.parameters[number]): number for number in order}
        return [[numbers[id(p)] for p in bucket] for bucket in buckets([self.parameters[n] for n in order])]


def buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one dtype and device, as many as a bucket holds; at least one."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        fits = size + parameter.nbytes <= BUCKET_BYTES
        if bucket and not (fits and (parameter.dtype, parameter.device) == (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
