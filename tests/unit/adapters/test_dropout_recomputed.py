"""Gradient checkpointing draws an adapter's dropout again as it was, also in models that have none of their own."""

from __future__ import annotations

import torch

import tiny_models
from automodel.adapters.attach import attach, resolve, trained_tensors
from automodel.adapters.config import PeftConfig
from automodel.models.checkpointing import use_gradient_checkpointing


def gradients(recomputed: bool) -> dict[str, torch.Tensor]:
    _, model = tiny_models.tiny("llama", "causal-lm")
    attach(model, resolve(PeftConfig(dim=4, dropout=0.5), model, "CAUSAL_LM", "base"))
    torch.manual_seed(5)
    with torch.no_grad():
        for tensor in trained_tensors(model).values():
            tensor.normal_(std=0.1)
    if recomputed:
        use_gradient_checkpointing(model, "full")
    model.train()
    torch.manual_seed(7)
    model(input_ids=torch.arange(5, 25)[None]).logits.square().sum().backward()
    return {name: tensor.grad for name, tensor in trained_tensors(model).items() if tensor.grad is not None}


def test_recomputed_gradients_are_those_of_the_forward_pass():
    kept, recomputed = gradients(False), gradients(True)
    assert len(kept) == 28
    for name, gradient in kept.items():
        torch.testing.assert_close(recomputed[name], gradient)
