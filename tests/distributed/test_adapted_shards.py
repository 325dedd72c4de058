"""Adapters under FSDP2, beside packed weights too, and on matrices cut over ranks: the gradients of one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor

from automodel.adapters.attach import attach, resolve, trained_tensors
from automodel.adapters.config import Packing, PeftConfig
from automodel.adapters.packed_linear import pack_layers
from automodel.distributed.farewell import wait_for_gloo
from automodel.distributed.fully_sharded import shard
from automodel.distributed.grid import make_grid
from automodel.distributed.layout import Layout
from automodel.distributed.tensor_parallel import apply_tensor_parallel
from tiny_models import tiny

IDS = torch.randint(5, 90, (4, 12), generator=torch.Generator().manual_seed(0))


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids).logits.square().sum() / IDS.shape[0]


def whole(resident):
    _, model = tiny("qwen3", "causal-lm")
    adapter = resolve(PeftConfig(dim=4, alpha=8), model, "CAUSAL_LM", "base")
    pack_layers(model, Packing("nf4", double=True, resident=resident), "cpu", torch.float32, ())
    attach(model, adapter)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in trained_tensors(model).items():
            if name.endswith("lora_B"):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return Loss(model)


def rank_of_many(rank, ranks, place, resident):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=ranks)
    own = whole(resident)
    shard(own, list(own.model.model.layers), make_grid(Layout(shards=ranks, fsdp=True), rank, "cpu"), compute=None,
          reduce=None)  # fmt: skip
    own(IDS[rank::ranks]).backward()
    gradients = {}
    for name, parameter in own.model.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter.grad, DTensor), name
            gradients[name] = parameter.grad.full_tensor()
        elif not parameter.is_floating_point():
            assert not isinstance(parameter, DTensor), name
    if rank == 0:
        torch.save(gradients, Path(place) / "gradients.pt")
    dist.destroy_process_group()
    wait_for_gloo()


@pytest.mark.parametrize(("ranks", "resident"), [(2, True), (4, False)])
def test_gradients_are_those_of_one_process(tmp_path, ranks, resident):
    alone = whole(resident)
    alone(IDS).backward()
    mp.start_processes(rank_of_many, (ranks, str(tmp_path), resident), nprocs=ranks, start_method="fork")
    found = torch.load(tmp_path / "gradients.pt")
    expected = {name: t.grad for name, t in trained_tensors(alone.model).items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))


class Hidden(nn.Module):
    """A loss of what goes into the head, which is cut by words."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model.model(input_ids=ids).last_hidden_state.square().sum() / IDS.shape[0]


def plain(kind):
    _, model = tiny(kind, "causal-lm", intermediate_size=48)
    attach(model, resolve(PeftConfig(dim=4, alpha=8), model, "CAUSAL_LM", "base"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in trained_tensors(model).items():
            if name.endswith("lora_B"):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return Hidden(model)


def cut_over(rank, ranks, place, kind, layout):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=ranks)
    own, grid = plain(kind), make_grid(layout, rank, "cpu")
    apply_tensor_parallel(own.model, grid)
    shard(own, list(own.model.model.layers), grid, compute=None, reduce=None)
    own(IDS[layout.data_rank(rank) :: layout.data_ranks]).backward()
    gradients = {n: p.grad.full_tensor() for n, p in own.model.named_parameters() if p.requires_grad}
    if rank == 0:
        torch.save(gradients, Path(place) / "gradients.pt")
    dist.destroy_process_group()
    wait_for_gloo()


@pytest.mark.parametrize(("kind", "layout"), [("llama", Layout(1, 2, 1, 2, True))])
def test_adapters_on_cut_matrices_learn_the_same(tmp_path, kind, layout):
    alone = plain(kind)
    alone(IDS).backward()
    mp.start_processes(cut_over, (layout.size, str(tmp_path), kind, layout), nprocs=layout.size, start_method="fork")
    found = torch.load(tmp_path / "gradients.pt")
    expected = {name: t.grad for name, t in trained_tensors(alone.model).items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()), msg=name)
