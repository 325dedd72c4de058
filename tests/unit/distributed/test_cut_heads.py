"""What cut matrices are refused with, before anything is cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tiny_models
from automodel.adapters.attach import attach, resolve
from automodel.adapters.config import PeftConfig
from automodel.config.errors import UserError
from automodel.distributed.tensor_parallel import apply_tensor_parallel


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_beside_the_head_is_refused(tied):
    """It ended in a traceback in the first step."""
    _, model = tiny_models.tiny("llama", "causal-lm", tie_word_embeddings=tied)
    section = PeftConfig(dim=4, target_modules=("q_proj", "lm_head"))
    attach(model, resolve(section, model, "causal-lm", "base"))
    grid: Any = SimpleNamespace(tensor=object())
    with pytest.raises(UserError, match=r"peft.target_modules: an adapter beside the head"):
        apply_tensor_parallel(model, grid)
