"""FSDP2: every rank keeps a part of each parameter, gradient and optimizer state, and gathers a layer when it runs.

torch's `fully_shard` does the work: one group for each block and one for the rest (embeddings, last norm, head), which
stays gathered from the start of the forward pass to the end of the backward pass. A step differs from torch's defaults
in two ways, so that it computes what one process computes:

- Gradients are *summed*, not averaged: the loss is divided by the labels of the whole step already.
- They are reduced once for each optimizer step, in the backward pass of its last micro-batch, block by block while the
  blocks before are still computing. Until then a rank adds up whole gradients, which costs it their memory.

All ranks gather together, so all of them run forward equally often; one with fewer micro-batches runs a blank one.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from automodel.distributed.grid import Grid
from automodel.distributed.shards import cut_dimension


def shard(
    whole: nn.Module,
    blocks: Sequence[nn.Module],
    grid: Grid,
    *,
    compute: torch.dtype | None,
    reduce: torch.dtype | None,
    offload: bool = False,
) -> None:
    """Shards `whole`, its `blocks` one by one. `compute`: what gathered weights are cast to; none: as they are held.
    `reduce`: the dtype gradients are summed in; none: fp32. `offload`: parts live in host memory."""
    assert grid.weights is not None
    _say_less()
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce or torch.float32)
    place = CPUOffloadPolicy() if offload else OffloadPolicy()
    # Codes of weights in few bits are no numbers that could be cast: each rank keeps them all, an eighth of fp32.
    codes = {p for p in whole.parameters() if not p.is_floating_point()}
    for block in blocks:
        fully_shard(block, mesh=grid.weights, mp_policy=policy, offload_policy=place, ignored_params=codes)
    # The whole takes a batch, whose tensors must stay as they are.
    own = dataclasses.replace(policy, cast_forward_inputs=False)
    fully_shard(whole, mesh=grid.weights, mp_policy=own, offload_policy=place, ignored_params=codes)
    for module in sharded_modules(whole):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums


def _say_less() -> None:
    """Two remarks of torch that every rank would make in every run. A packed block returns a view of its rows, which
    nobody writes into (tests compare every layout with one process). Weights that are cut twice are put together by two
    gathers instead of one, when they are exported."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def sharded_modules(whole: nn.Module) -> list[FSDPModule]:
    return [module for module in whole.modules() if isinstance(module, FSDPModule)]


def reduces(whole: Any, last: bool) -> None:
    """Whether the next backward pass reduces gradients: only that of a step's last micro-batch."""
    whole.set_requires_gradient_sync(last)


def settle(whole: nn.Module) -> None:
    """Lets go of gathered weights, so that every parameter is this rank's part again."""
    for module in sharded_modules(whole):
        module.reshard()


def copies_of(parameter: Tensor) -> int:
    """How many ranks hold the same piece of a parameter."""
    world = dist.get_world_size()
    if not isinstance(parameter, DTensor):
        return world
    mesh, cuts = parameter.device_mesh, 1
    for axis, placement in enumerate(parameter.placements):
        if cut_dimension(placement) is not None:
            cuts *= mesh.size(axis)
    return world // cuts


@torch.no_grad()
def clip_by_global_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scales gradients down to `max_norm` and returns their norm before: that of the whole model, over all ranks. Every
    piece is counted once, however many ranks hold it; one reduction of one number."""
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    locals_ = [g.to_local() if isinstance(g, DTensor) else g for _, g in held]
    if not locals_:
        squares = torch.zeros((), dtype=torch.float32)
    else:
        norms = torch._foreach_norm(locals_)
        shares = torch.tensor([1 / copies_of(p) for p, _ in held], dtype=torch.float32, device=norms[0].device)
        squares = (torch.stack([norm.float() for norm in norms]).square() * shares).sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    if max_norm:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(locals_, factor)
    return norm
