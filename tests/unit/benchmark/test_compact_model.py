"""A compact model folder comes back as the model it was, up to 1/127 of each row's largest weight."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertModel

import tiny_runs as tiny

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "compact_model.py"


@pytest.fixture
def compact():
    spec = importlib.util.spec_from_file_location("compact_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_round_trip(compact, tmp_path):
    folder = tiny.make_model_folder(tmp_path / "mlm", "bert")
    model = BertModel.from_pretrained(folder)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "special_tokens_map.json").touch()
    kept = [0, 2, 3, 7, 9]
    size = compact.shrink(tmp_path / "model", tmp_path / "small", kept)
    assert size == sum(p.stat().st_size for p in (tmp_path / "small").iterdir())
    packed = (tmp_path / "small" / compact.WEIGHTS).stat().st_size
    assert packed < 0.6 * (tmp_path / "model" / "model.safetensors").stat().st_size
    compact.expand(tmp_path / "small", tmp_path / "again")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("model", "again"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        back = after[name]
        assert back.shape == tensor.shape
        assert back.dtype == torch.float32
        if name.endswith("word_embeddings.weight"):
            others = [i for i in range(len(tensor)) if i not in kept]
            assert not back[others].any()
            tensor, back = tensor[kept], back[kept]
        if tensor.ndim < 2:
            assert torch.equal(back, tensor)
        else:
            largest = tensor.abs().amax(dim=1, keepdim=True)
            # Half a level, and a little for the scale's own rounding to fp16.
            assert ((back - tensor).abs() <= largest * (0.51 / compact.STEPS) + 1e-6).all(), name
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again", num_labels=2)
    assert loaded(torch.tensor([kept])).logits.isfinite().all()
