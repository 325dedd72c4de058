"""Parameter groups, and optimizer state that survives a round trip exactly."""

import pytest
import torch
from torch import nn

from automodel.config.errors import UserError
from automodel.optim.build import build_optimizer, load_state_tensors, parameter_groups, state_tensors
from automodel.optim.config import OptimizerConfig


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def test_norms_and_biases_do_not_decay():
    model = small_model()
    groups = parameter_groups(model, OptimizerConfig(weight_decay=0.1))
    assert [len(g["params"]) for g in groups] == [2, 4]
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    everything = parameter_groups(model, OptimizerConfig(weight_decay=0.1, decay_norms_and_biases=True))
    assert [len(g["params"]) for g in everything] == [6]


def test_norms_with_a_row_for_each_head_do_not_decay_either():
    """Trainer's own choice, for a family whose norms are matrices."""
    from transformers import Trainer

    import tiny_models

    _, model = tiny_models.tiny("cohere", "causal-lm", use_qk_norm=True, tie_word_embeddings=False)
    decayed = parameter_groups(model, OptimizerConfig(weight_decay=0.1))[0]["params"]
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed} == set(Trainer.get_decay_parameter_names(None, model))


def train_some(model, optimizer, steps):
    for step in range(steps):
        model(torch.full((3, 4), 0.1 * step + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("cfg", "target"),
    [
        (OptimizerConfig(lr=1e-2, weight_decay=0.1), None),
        (OptimizerConfig(lr=1e-2, extra={"momentum": 0.9}), torch.optim.SGD),
    ],
)
def test_state_round_trip_continues_exactly(cfg, target):
    model = small_model()
    optimizer = build_optimizer(model, cfg, target)
    train_some(model, optimizer, 3)
    tensors, values = state_tensors(optimizer, model)
    twin = small_model()
    twin.load_state_dict(model.state_dict())
    twin_optimizer = build_optimizer(twin, cfg, target)
    load_state_tensors(twin_optimizer, twin, {k: t.clone() for k, t in tensors.items()}, values)
    train_some(model, optimizer, 3)
    train_some(twin, twin_optimizer, 3)
    for a, b in zip(model.parameters(), twin.parameters()):
        assert torch.equal(a, b)


def test_wrong_arguments_are_named():
    with pytest.raises(UserError, match=r"optimizer: torch.optim.*refused its arguments"):
        build_optimizer(small_model(), OptimizerConfig(extra={"nesterov": True}), torch.optim.SGD)


def test_state_of_another_model_is_refused():
    model = small_model()
    optimizer = build_optimizer(model, OptimizerConfig())
    with pytest.raises(UserError, match="state for 'encoder.weight'"):
        load_state_tensors(optimizer, model, {"exp_avg/encoder.weight": torch.zeros(2)}, {})
