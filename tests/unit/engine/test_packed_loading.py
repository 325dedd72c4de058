"""Weights that are packed while they are read from their files are those that are packed after loading."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tiny_runs as tiny
from automodel.adapters.attach import resolve
from automodel.adapters.config import Packing, PeftConfig
from automodel.adapters.packed_linear import PackedLinear
from automodel.engine import frozen_base
from automodel.models.config import ModelConfig
from automodel.models.load import load_hf_config, without_memory
from automodel.tasks.registry import task_named


@pytest.mark.parametrize(
    ("kind", "task", "extra"),
    [
        ("llama", "causal-lm", {}),
        ("llama", "causal-lm", {"tie_word_embeddings": True, "attention_bias": True}),
        ("llama", "text-classification", {}),  # whose head no file has
        ("bert", "text-classification", {}),
    ],
)
@pytest.mark.parametrize("resident", [False, True])
def test_read_one_by_one_or_loaded_whole(tmp_path, monkeypatch, kind, task, extra, resident):
    cfg = ModelConfig(pretrained_model_name_or_path=str(tiny.make_model_folder(tmp_path / "model", kind, **extra)))
    hf_config = load_hf_config(cfg, task_named(task).head, 2 if task != "causal-lm" else None)
    adapter = resolve(
        PeftConfig(dim=2), without_memory(hf_config, task_named(task).head), task_named(task).head.adapter_type, "base"
    )
    packing = Packing("nf4", double=True, resident=resident)
    plan = SimpleNamespace(packing=packing, precision="fp32", device="cpu", capture=False)
    prepared = SimpleNamespace(
        cfg=SimpleNamespace(model=cfg, seed=3), plan=plan, adapter=adapter, hf_config=hf_config, task=task_named(task)
    )
    loaded = []
    whole = frozen_base.load_model
    monkeypatch.setattr(frozen_base, "load_model", lambda *a, **k: loaded.append(a) or whole(*a, **k))
    streamed = frozen_base._packed(prepared, torch.float32)
    assert not loaded
    monkeypatch.setattr(frozen_base, "open_weights", lambda *_: None)
    at_once = frozen_base._packed(prepared, torch.float32)
    assert loaded
    assert any(isinstance(m, PackedLinear) for m in streamed.modules()) != resident
    ours, theirs = dict(streamed.named_parameters()), dict(at_once.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name, buffer in at_once.named_buffers():
        assert torch.equal(streamed.get_buffer(name), buffer), name
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(streamed.eval()(input_ids=ids).logits, at_once.eval()(input_ids=ids).logits)
