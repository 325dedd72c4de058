"""Checkpoints that several ranks write together, and any other number of ranks reads. Real processes, gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from automodel.checkpoint import tensor_file
from automodel.checkpoint.store import CheckpointStore, SaveFailedError
from automodel.distributed.shards import fill
from automodel.distributed.world import Alone
from forked_ranks import spawn

SHAPES = {"rows": (10, 7), "columns": (6, 9), "both": (8, 8), "copies": (5, 3), "few": (3,), "scalar": ()}


def whole(step: int = 1) -> dict[str, torch.Tensor]:
    """The truth, the same on every rank."""
    chance = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}
    tensors["rows"] = tensors["rows"].to(torch.bfloat16)
    return tensors


def laid_out(ranks: Alone, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Shards of all kinds: by rows, by columns, twice, copies of shards (HSDP), more ranks than rows, plain."""
    line = init_device_mesh("cpu", (ranks.size,))
    grid = init_device_mesh("cpu", (2, ranks.size // 2)) if ranks.size > 1 else line
    two = grid.ndim == 2
    placed = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "both": (grid, [Shard(0), Shard(1)] if two else [Shard(0)]),
        "copies": (grid, [Replicate(), Shard(0)] if two else [Shard(0)]),
        "few": (line, [Shard(0)]),
    }
    sharded = {name: distribute_tensor(tensors[name].clone(), mesh, how) for name, (mesh, how) in placed.items()}
    return {**sharded, "scalar": tensors["scalar"].clone()}


def groups(ranks: Alone, step: int) -> dict:
    return {"model": laid_out(ranks, whole(step)), "rng": {"torch": torch.full((4,), step)}}


def refuse(rank: int, step: int) -> None:
    """A disk that is full for one rank, at one step."""
    write = tensor_file.write_tensors

    def write_or_refuse(path, *rest):
        if f"step-{step:08d}" in str(path) and f"rank-{rank:05d}" in path.name:
            raise OSError(28, "No space left on device", str(path))
        return write(path, *rest)

    tensor_file.write_tensors = write_or_refuse


def writes(ranks: Alone, folder: Path) -> None:
    """Two good ones in the background; then one that a rank cannot write, with both ways to take it; then damage."""
    store = CheckpointStore(folder, keep_last=3, ranks=ranks)
    for step in (1, 2):
        tensors = groups(ranks, step)
        store.begin(step, tensors, {"step": step})
        for tensor in tensors["model"].values():
            tensor.zero_()  # training goes on
    store.wait()
    ranks.barrier()
    refuse(rank=ranks.size - 1, step=3)
    store.begin(3, groups(ranks, 3), {"step": 3})
    with pytest.raises(SaveFailedError, match=f"rank {ranks.size - 1}: No space left on device.*step 2 is kept"):
        store.wait()
    said: list[str] = []
    patient = CheckpointStore(folder, keep_last=3, ranks=ranks, on_error="continue")
    patient.warn = said.append
    patient.begin(3, groups(ranks, 3), {"step": 3})
    patient.begin(4, groups(ranks, 4), {"step": 4})
    patient.wait()
    assert len(said) == 1
    assert "training goes on" in said[0]
    ranks.barrier()
    if ranks.first:
        assert [c.step for c in store.complete()] == [1, 2, 4]
        assert not list(folder.glob(".unfinished-*"))
        damaged = folder / "step-00000004" / f"model-rank-00002-of-{ranks.size:05d}.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1])
    ranks.barrier()
    checkpoint, notes = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert len(notes) == 1
    assert "model-rank-00002-of" in notes[0]
    assert "Falling back" in notes[0]


def reads(ranks: Alone, folder: Path) -> None:
    checkpoint, _ = CheckpointStore(folder, ranks=ranks).latest()
    assert checkpoint is not None
    saved, truth = checkpoint.parts("model"), whole(2)
    for name, tensor in laid_out(ranks, whole(9)).items():
        fill(tensor, lambda slices, name=name: saved[name][slices])
        expected = laid_out(ranks, truth)[name]
        pair = [t.to_local() if hasattr(t, "to_local") else t for t in (tensor, expected)]
        assert torch.equal(*pair), name
    assert torch.equal(checkpoint.tensors("rng")["torch"], torch.full((4,), 2))
    assert checkpoint.state() == {"step": 2}


def writes_two(ranks: Alone, folder: Path) -> None:
    CheckpointStore(folder, ranks=ranks).save(2, groups(ranks, 2), {"step": 2})


def test_four_ranks_write_and_two_or_one_read(tmp_path):
    spawn(4, writes, tmp_path)
    checkpoint, _ = CheckpointStore(tmp_path).latest()
    assert checkpoint is not None
    files = {path.name for path in checkpoint.folder.iterdir()}
    parts = {f"model-rank-{rank:05d}-of-00004.safetensors" for rank in range(4)}
    assert files == parts | {"rng.safetensors", "state.json", "manifest.json"}
    assert checkpoint.manifest()["ranks"] == 4
    found = checkpoint.tensors("model")
    assert found.keys() == SHAPES.keys()
    for name, tensor in whole(2).items():
        assert torch.equal(found[name], tensor), name
    sizes = [(checkpoint.folder / name).stat().st_size for name in sorted(parts)]
    assert max(sizes) < sum(sizes) / 2, "everyone writes its share"
    spawn(2, reads, tmp_path)
    spawn(4, reads, tmp_path)


def test_two_ranks_write_and_four_or_one_read(tmp_path):
    spawn(2, writes_two, tmp_path)
    found = CheckpointStore(tmp_path).latest()[0].tensors("model")
    assert all(torch.equal(found[name], tensor) for name, tensor in whole(2).items())
    spawn(4, reads, tmp_path)
