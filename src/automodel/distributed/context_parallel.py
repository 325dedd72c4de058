"""Context parallelism: the tokens of one batch on several ranks, for documents that are too long for one.

Everything in a transformer but attention works on each token alone. So every rank computes its neighbouring part of the
stream, and for attention the ranks trade: each hands out the heads it does not keep and gets the tokens it does not
have (all-to-all, DeepSpeed's Ulysses). A rank then sees all tokens of some heads, runs the ordinary attention over
documents, and trades back. Exact, whatever the documents; the traffic is 4 · T/ranks · width numbers a layer, there and
back, where gathering keys and values would send 2 · T · width.

For that the ranks must be able to share the heads equally. Where there are fewer key and value heads than ranks, these
are repeated first. Where heads run out, keys and values are gathered instead (`models/gathered_attention.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Trade(torch.autograd.Function):
    """Block i of the first dimension goes to rank i; what comes from rank i becomes block i. Its own inverse."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: Any) -> Tensor:
        ctx.group = group
        blocks = blocks.contiguous()
        traded = torch.empty_like(blocks)
        dist.all_to_all_single(traded, blocks, group=group)
        return traded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # ty: ignore[incompatible-method-override]
        return _Trade.apply(gradient, ctx.group), None


def all_tokens_of_some_heads(x_1HTD: Tensor, group: Any) -> Tensor:
    """(1, H, T/ranks, D) of this rank's tokens in, (1, H/ranks, T, D) of this rank's heads out."""
    ranks = dist.get_world_size(group)
    heads = x_1HTD.shape[1]
    if heads < ranks:
        x_1HTD = x_1HTD.repeat_interleave(ranks // heads, dim=1)
    blocks = x_1HTD[0].unflatten(0, (ranks, -1))  # ranks, heads of each, tokens, D
    traded = _Trade.apply(blocks, group)
    return traded.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def all_heads_of_some_tokens(x_1THD: Tensor, group: Any) -> Tensor:
    """(1, T, H/ranks, D) of this rank's heads in, (1, T/ranks, H, D) of this rank's tokens out."""
    ranks = dist.get_world_size(group)
    blocks = x_1THD[0].unflatten(0, (ranks, -1))  # ranks, tokens of each, heads, D
    traded = _Trade.apply(blocks, group)
    return traded.transpose(0, 1).flatten(1, 2).unsqueeze(0)


class _Gather(torch.autograd.Function):
    """(ranks, …): the tensor of every rank. Backward, each rank gets the sum of what all have for its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        blocks = own.new_empty((dist.get_world_size(group), *own.shape))
        dist.all_to_all_single(blocks, own.expand(blocks.shape).contiguous(), group=group)
        return blocks

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # ty: ignore[incompatible-method-override]
        gradient = gradient.contiguous()
        traded = torch.empty_like(gradient)
        dist.all_to_all_single(traded, gradient, group=ctx.group)
        return traded.sum(0), None


def tokens_of_all(x_1KTD: Tensor, group: Any) -> Tensor:
    """(1, K, T/ranks, D) of this rank's tokens in, (1, K, T, D) of all tokens out."""
    return _Gather.apply(x_1KTD[0], group).transpose(0, 1).flatten(1, 2).unsqueeze(0)
