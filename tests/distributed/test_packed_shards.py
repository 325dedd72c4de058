"""Adapters beside packed weights under FSDP2: two and four ranks compute the gradients of one."""

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
from automodel.distributed.fully_sharded import shard
from automodel.distributed.grid import make_grid
from automodel.distributed.layout import Layout
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
    adapter = resolve(PeftConfig(dim=4, alpha=8), model, "causal-lm", "base")
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


@pytest.mark.parametrize(("ranks", "resident"), [(2, False), (4, False), (2, True)])
def test_gradients_are_those_of_one_process(tmp_path, ranks, resident):
    alone = whole(resident)
    alone(IDS).backward()
    mp.start_processes(rank_of_many, (ranks, str(tmp_path), resident), nprocs=ranks, start_method="fork")
    found = torch.load(tmp_path / "gradients.pt")
    expected = {name: t.grad for name, t in trained_tensors(alone.model).items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))
