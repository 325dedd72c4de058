"""Inputs of checkpointed layers that wait elsewhere: the gradients are those of layers that keep them, bit for bit."""

import pytest
import torch
import torch.nn.functional as F

from automodel.config.errors import UserError
from automodel.kernels.flat_parameters import FlatParameters
from automodel.models.checkpointing import use_gradient_checkpointing
from automodel.models.forward import make_forward
from automodel.models.fuse import fuse
from automodel.models.recompute import HostMemory, Kept, forget_pass, use_own_checkpoints
from automodel.models.task_head import NEXT_TOKEN
from automodel.optim.build import parameter_groups
from automodel.optim.config import OptimizerConfig
from parity.test_fused_decoders import SIZE
from parity.test_packed_families import documents, packed
from tiny_models import tiny


def make(kind, mode, *, offload, fused, layers=4):
    """offload: none leaves torch's checkpoints in place."""
    torch.manual_seed(0)
    _, model = tiny(kind, "causal-lm", **SIZE, num_hidden_layers=layers)
    model.train()
    FlatParameters(parameter_groups(model, OptimizerConfig()))
    if mode != "none":
        use_gradient_checkpointing(model, mode)
    memory = None if offload is None else use_own_checkpoints(model, offload)
    if fused:
        assert fuse(model, torch.zeros(1, dtype=torch.int64), None, 24)
    return model, make_forward(model, NEXT_TOKEN, "packed", swapped=fused), memory


def learn(model, forward, seed=0):
    batch = packed(documents(seed), "causal-lm", None)
    model.zero_grad(set_to_none=True)
    loss = F.cross_entropy(forward(batch).float(), batch.labels_R)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_inputs_that_stay(kind, fused):
    plain, exact = learn(*make(kind, "full", offload=None, fused=fused, layers=2)[:2])
    model, forward, memory = make(kind, "full", offload=False, fused=fused, layers=2)
    loss, gradients = learn(model, forward)
    assert isinstance(memory, Kept)
    assert loss == plain
    assert not memory.here
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, exact[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "olmo2"])
def test_gradients_are_the_same(kind, mode, fused):
    plain, exact = learn(*make(kind, mode, offload=None, fused=fused)[:2])
    model, forward, memory = make(kind, mode, offload=True, fused=fused)
    for seed in (0, 2, 0):  # other shapes in between
        loss, gradients = learn(model, forward, seed)
    assert loss == plain
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, exact[name], rtol=1e-5, atol=1e-7, msg=name)
    count = 4 if mode == "full" else 2
    assert memory.last == count - 1
    assert {layer for layer, _ in memory.buffers} == set(range(count - 1))  # the last one's stay
    assert not memory.here
    assert not memory.leaving


@pytest.mark.parametrize("offload", [True, False])
def test_a_pass_that_breaks_off_leaves_nothing_to_the_next(monkeypatch, offload):
    _, exact = learn(*make("llama", "full", offload=None, fused=True)[:2], seed=2)
    model, forward, memory = make("llama", "full", offload=offload, fused=True)
    taken, take = [], memory.take

    def breaks(layer, device):
        taken.append(layer)
        if len(taken) == 2:
            raise RuntimeError("no memory")
        return take(layer, device)

    monkeypatch.setattr(memory, "take", breaks)
    with pytest.raises(RuntimeError, match="no memory"):
        learn(model, forward)
    assert memory.here
    forget_pass(model)
    assert not memory.here
    for name, gradient in learn(model, forward, seed=2)[1].items():
        torch.testing.assert_close(gradient, exact[name], rtol=1e-5, atol=1e-7, msg=name)


def test_micro_batches_add_up():
    model, forward, _ = make("llama", "full", offload=True, fused=True)
    plain, forward_plain, _ = make("llama", "none", offload=None, fused=True)
    for seed in (0, 2):
        for run in (forward, forward_plain):
            batch = packed(documents(seed), "causal-lm", None)
            F.cross_entropy(run(batch).float(), batch.labels_R).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_evaluation_moves_nothing():
    _, forward, memory = make("llama", "full", offload=True, fused=True)
    with torch.no_grad():
        forward(packed(documents(0), "causal-lm", None))
    assert not memory.buffers
    assert not memory.here


def test_frozen_embeddings_do_not_stop_the_layers():
    model, forward, _ = make("llama", "full", offload=True, fused=False)
    model.get_input_embeddings().weight.requires_grad_(False)
    batch = packed(documents(0), "causal-lm", None)
    F.cross_entropy(forward(batch).float(), batch.labels_R).backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.any()


def test_buffers_grow_and_old_ones_stay():
    memory = HostMemory(2)
    first = memory._place(0, 0, torch.zeros(4))
    assert memory._place(0, 0, torch.zeros(2)).data_ptr() == first.data_ptr()
    assert memory._place(0, 0, torch.zeros(8)).data_ptr() != first.data_ptr()
    assert len(memory.outgrown) == 1


def test_layers_have_to_be_told_apart():
    with pytest.raises(UserError, match="activation_offload: the layers of Linear cannot be told apart"):
        use_own_checkpoints(torch.nn.Linear(2, 2), offload=True)
