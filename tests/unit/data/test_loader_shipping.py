"""Batches of worker processes travel as arrays and arrive as the same tensors."""

import pickle

import numpy as np
import torch

from automodel.data.collate import PackedCollator
from automodel.data.loader import Shipped, StepLoader, _replaced
from automodel.data.samples import SampleWriter
from automodel.data.store import TokenStore


def make_loader(workers: int) -> StepLoader:
    rng, writer = np.random.default_rng(0), SampleWriter()
    for row in range(24):
        writer.add(row, rng.integers(5, 90, rng.integers(2, 20)).tolist(), label=row % 3)
    collate = PackedCollator(
        TokenStore.in_memory(writer.finish()), place="document", bucket_tokens=8, max_seqlen=20,
        micro_batch_size=3, sort_tokens=True,
    )  # fmt: skip
    return StepLoader(collate, lengths=collate.store.lengths, micro_batch_size=3, grad_acc_steps=2, num_workers=workers)


def test_workers_change_nothing():
    streams = [iter(make_loader(workers)) for workers in (0, 2)]
    for _ in range(5):
        here, there = (next(stream) for stream in streams)
        assert type(here) is type(there)
        assert (here.epoch, here.step_in_epoch) == (there.epoch, there.step_in_epoch)
        for own, other in zip(here.micro_batches, there.micro_batches, strict=True):
            for name, value in vars(own).items():
                arrived = getattr(other, name)
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value, arrived), name
                    assert value.dtype == arrived.dtype
                else:
                    assert value == arrived, name
    for stream in streams:
        stream.close()


def test_what_is_shipped_holds_no_tensor():
    """One would cost a file descriptor and a handshake."""
    batch = next(iter(make_loader(0)))
    shipped = Shipped(_replaced(batch, torch.Tensor, torch.Tensor.numpy))
    assert b"torch" not in pickle.dumps(shipped)
    assert torch.equal(
        pickle.loads(pickle.dumps(shipped)).unpacked().micro_batches[0].input_ids_T, batch.micro_batches[0].input_ids_T
    )
