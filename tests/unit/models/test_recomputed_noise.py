"""Layers that are computed again draw the same noise before their router again, and so the same experts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from automodel.models.checkpointing import use_gradient_checkpointing

sys.path.append(os.fspath(Path(__file__).parents[2] / "architectures"))
import tiny

NOISY = {
    "dbrx": {"ffn_config": {"moe_jitter_eps": 0.3}},
    "minimax": {"router_jitter_noise": 0.3},
    "mixtral": {"router_jitter_noise": 0.3},
    "phimoe": {"router_jitter_noise": 0.3},  # draws one of the experts whose scores are so close
}


@pytest.mark.parametrize("kind", NOISY)
def test_checkpointing_changes_no_gradient(kind):
    model = tiny.tiny_model(kind, "causal-lm", **NOISY[kind]).train()
    ids = torch.randint(5, 90, (2, 11), generator=torch.Generator().manual_seed(0))

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    kept = gradients()
    torch.manual_seed(2)
    use_gradient_checkpointing(model, "full")
    again = gradients()
    assert kept.keys() == again.keys()
    for name, gradient in kept.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
