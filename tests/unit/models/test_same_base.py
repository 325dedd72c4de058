"""Weights are told from others by samples of their files."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

from automodel.models.config import ModelConfig
from automodel.models.same_base import sample_of


def folder(path, value=0.0, shards=1):
    """Two matrices of a megabyte, in one file or two."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    torch.manual_seed(0)
    tensors = {name: torch.randn(512, 512) + value for name in ("a", "b")}
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    for name, tensor in tensors.items():
        save_file({name: tensor}, path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def sample(path):
    return sample_of(ModelConfig(pretrained_model_name_or_path=str(path)))


def test_trained_weights_differ_and_copies_do_not(tmp_path):
    for shards in (1, 2):
        one = sample(folder(tmp_path / f"one-{shards}", shards=shards))
        assert one == sample(folder(tmp_path / f"copy-{shards}", shards=shards))
        assert one != sample(folder(tmp_path / f"other-{shards}", value=1e-3, shards=shards))


def test_what_cannot_be_read_is_not_known(tmp_path):
    path = folder(tmp_path / "damaged")
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert sample(path) is None
    (path / "model.safetensors").unlink()
    assert sample(path) is None
