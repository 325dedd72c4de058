"""What cut matrices are refused with, before anything is cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tiny_models
from automodel.adapters.attach import attach, resolve
from automodel.adapters.config import PeftConfig
from automodel.config.errors import UserError
from automodel.distributed.layout import Layout
from automodel.distributed.tensor_parallel import apply_tensor_parallel

GRID: Any = SimpleNamespace(tensor=object(), layout=Layout(tp=2, fsdp=True))


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_beside_the_head_is_refused(tied):
    """It ended in a traceback in the first step."""
    _, model = tiny_models.tiny("llama", "causal-lm", tie_word_embeddings=tied)
    section = PeftConfig(dim=4, target_modules=("q_proj", "lm_head"))
    attach(model, resolve(section, model, "CAUSAL_LM", "base"))
    with pytest.raises(UserError, match=r"peft.target_modules: an adapter beside the head"):
        apply_tensor_parallel(model, GRID)


@pytest.mark.parametrize(
    ("kind", "weight", "settings"),
    [
        ("phi", "self_attn.q_layernorm.weight", {"qk_layernorm": True}),
        ("cohere", "self_attn.q_norm.weight", {"use_qk_norm": True}),
        ("apertus", "mlp.act_fn.alpha_p", {}),
    ],
)
def test_weights_that_the_table_forgets_are_refused(monkeypatch, kind, weight, settings):
    """Each rank trained Phi's and Apertus's by its own part of the activations, without a word."""
    monkeypatch.setitem(tiny_models.SETTINGS, "apertus", tiny_models.SETTINGS["llama"])
    _, model = tiny_models.tiny(kind, "causal-lm", **settings)
    with pytest.raises(UserError, match=rf"does not say how ranks share 'layers.0.{weight}'.*tp_size: 1"):
        apply_tensor_parallel(model, GRID)
