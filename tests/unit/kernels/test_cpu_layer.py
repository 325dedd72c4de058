"""A layer as one node of autograd against the same layer in steps: outputs, gradients, dropout, what it keeps."""

from __future__ import annotations

import torch

from automodel.kernels import cpu_layer
from automodel.kernels.cpu_attention import Documents
from automodel.kernels.cpu_dropout import cpu_dropout
from automodel.kernels.cpu_layer import LayerShape, LayerWeights, post_norm_layer, post_norm_layer_reference

WIDTH, INNER, HEADS = 24, 40, 3
LENGTHS = [7, 1, 12]
SHAPE = LayerShape(HEADS, 1e-12, 1e-5)
DOCUMENTS = Documents(LENGTHS, LENGTHS, 0.35)


def drawn() -> tuple[torch.Tensor, LayerWeights]:
    torch.manual_seed(0)
    square, vector = (WIDTH, WIDTH), (WIDTH,)
    shapes = LayerWeights(
        square, square, square, vector, vector, vector, square, vector, vector, vector,
        (INNER, WIDTH), (INNER,), (WIDTH, INNER), vector, vector, vector,
    )  # fmt: skip
    weights = LayerWeights(*(torch.randn(shape).mul_(0.3).requires_grad_() for shape in shapes))
    return torch.randn(sum(LENGTHS), WIDTH, requires_grad=True), weights


def gradients(function, shape=SHAPE, documents=DOCUMENTS):
    x, weights = drawn()
    y = function(x, weights, shape, documents)
    return y, torch.autograd.grad(y, (x, *weights), torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))


def test_equals_the_layer_in_steps():
    ours, theirs = gradients(post_norm_layer), gradients(post_norm_layer_reference)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_drops_what_the_steps_drop(monkeypatch):
    """Both draw from where `drawn` has left the generator, in the same order."""
    shape = SHAPE._replace(out_dropout=0.2, down_dropout=0.4)
    monkeypatch.setattr(cpu_layer.F, "dropout", cpu_dropout)
    ours, theirs = gradients(post_norm_layer, shape), gradients(post_norm_layer_reference, shape)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours[0], gradients(post_norm_layer)[0])


def test_attention_drops_too():
    torch.manual_seed(0)
    dropping = DOCUMENTS._replace(dropout=0.5)
    assert not torch.allclose(gradients(post_norm_layer, documents=dropping)[0], gradients(post_norm_layer)[0])


def test_a_second_backward_pass_gives_the_same():
    """Residuals are added in place: nothing that autograd keeps may change by it."""
    x, weights = drawn()
    y = post_norm_layer(x, weights, SHAPE, DOCUMENTS)
    dy = torch.randn(y.shape)
    before = dy.clone()
    first = torch.autograd.grad(y, (x, *weights), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, *weights), dy)
    assert torch.equal(dy, before)
    for one, other in zip(first, second):
        assert torch.equal(one, other)


def test_gradients_of_joined_layers_accumulate_apart():
    """They are parts of one tensor, and must not grow into each other."""
    x, weights = drawn()
    for _ in range(2):
        post_norm_layer(x, weights, SHAPE, DOCUMENTS).square().sum().backward()
    twice = [w.grad for w in weights]
    x, weights = drawn()
    post_norm_layer(x, weights, SHAPE, DOCUMENTS).square().sum().backward()
    torch.testing.assert_close(twice, [2 * w.grad for w in weights], rtol=1e-5, atol=1e-5)
