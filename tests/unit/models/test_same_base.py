"""Weights that were replaced are told from those of before, also where only some of them were."""

import pytest
import torch
from safetensors.torch import save_file

from automodel.config.errors import UserError
from automodel.models.config import ModelConfig
from automodel.models.same_base import MOST_READS, PLACES, known, sample_of


@pytest.fixture
def base(tmp_path):
    generator = torch.Generator().manual_seed(0)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    names = [f"model.layers.{i}.self_attn.{kind}_proj.weight" for i in range(12) for kind in "qkvo"]
    tensors = {name: torch.randn(64, 96, generator=generator) for name in names} | {"scale": torch.ones(())}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


def asked(folder):
    return sample_of(ModelConfig(pretrained_model_name_or_path=str(folder)))


def test_the_same_weights_are_the_same(base, tmp_path_factory):
    folder, tensors = base
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors, elsewhere / "model.safetensors")
    assert known(asked(folder)) is not None
    assert asked(folder) == asked(elsewhere)


def test_every_tensor_counts(base):
    folder, tensors = base
    before = asked(folder)
    for name in tensors:
        save_file({**tensors, name: tensors[name] + 0.3}, folder / "model.safetensors")
        assert asked(folder) != before, name
    save_file(tensors, folder / "model.safetensors")
    assert asked(folder) == before


def test_many_experts_are_sampled_in_fewer_places(base):
    folder, _ = base
    many = {f"experts.{i}": torch.full((2, 8), float(i)) for i in range(MOST_READS // PLACES + 1)}
    save_file(many, folder / "model.safetensors")
    before = asked(folder)
    save_file({**many, "experts.77": torch.zeros(2, 8)}, folder / "model.safetensors")
    assert asked(folder) != before


def test_what_earlier_versions_told_cannot_be_compared():
    assert known("0123abcd") is None
    assert known(None) is None


def test_a_model_that_is_not_there_is_said_and_not_taken_for_a_damaged_one(tmp_path):
    with pytest.raises(UserError, match=r"model\.pretrained_model_name_or_path: there is no folder"):
        asked(tmp_path / "gone")
