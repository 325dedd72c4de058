"""Files written by our own writer are what the safetensors library reads."""

import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from automodel.checkpoint import tensor_file
from automodel.checkpoint.tensor_file import DTYPES, write_tensors, write_unhashed


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(tmp_path, dtype):
    values = torch.arange(24).reshape(2, 3, 4)
    tensors = {"full": values.to(dtype), "scalar": values[0, 0, 1].to(dtype), "empty": values[:0].to(dtype)}
    write_tensors(tmp_path / "t.safetensors", tensors)
    loaded = load_file(tmp_path / "t.safetensors")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (loaded[name], tensor)))


def test_views_and_mixed_dtypes(tmp_path):
    base = torch.randn(6, 5)
    tensors = {
        "b": base.T,
        "a": base[1:3, ::2],
        "odd": torch.tensor([True, False, True]),
        "c": base[0].to(torch.bfloat16),
    }
    write_tensors(tmp_path / "t.safetensors", tensors)
    loaded = load_file(tmp_path / "t.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
    with safe_open(tmp_path / "t.safetensors", "pt") as file:  # what other readers see
        assert file.get_slice("b").get_shape() == [5, 6]


@pytest.mark.parametrize("seat", [1000, 4096, 1 << 23])
@pytest.mark.parametrize("numbers", [0, 1, 7, 1003, 1024, 5000])
def test_size_and_digest_are_those_of_the_file(tmp_path, monkeypatch, seat, numbers):
    monkeypatch.setattr(tensor_file, "SEAT", seat)  # several to a tensor, several tensors to one, the last one not full
    path = tmp_path / "t.safetensors"
    tensors = {"x": torch.randn(numbers), "y": torch.arange(7), "z": torch.randn(40, 60).T}
    written = write_tensors(path, tensors)
    data = path.read_bytes()
    assert written.size == len(data)
    assert written.sha256 == hashlib.sha256(data).hexdigest()
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_no_tensors_is_a_valid_file(tmp_path):
    write_tensors(tmp_path / "t.safetensors", {})
    assert load_file(tmp_path / "t.safetensors") == {}


def test_a_dtype_the_format_does_not_know_is_named(tmp_path):
    with pytest.raises(ValueError, match="odd has dtype torch.complex128"):
        write_tensors(tmp_path / "t.safetensors", {"odd": torch.zeros(2, dtype=torch.complex128)})


def test_without_a_hash_it_is_the_same_file(tmp_path):
    tensors = {"x": torch.randn(1234), "y": torch.arange(7), "z": torch.randn(3, 4).T}
    write_tensors(tmp_path / "a", tensors, {"format": "pt"})
    write_unhashed(tmp_path / "b", tensors, {"format": "pt"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
