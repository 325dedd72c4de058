"""A layer as one node of autograd against the same layer in steps: outputs, gradients, dropout, what it keeps."""

from __future__ import annotations

import pytest
import torch

from automodel.kernels import cpu_layer
from automodel.kernels.cpu_attention import Documents
from automodel.kernels.cpu_dropout import cpu_dropout
from automodel.kernels.cpu_layer import (
    LayerShape,
    LayerWeights,
    Matrices,
    post_norm_layer,
    post_norm_layer_reference,
)
from automodel.kernels.cpu_products import Bf16Copies, Bf16Products, OnednnProducts, has_onednn

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


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_products_in_bf16_are_near_the_layer_in_fp64(monkeypatch, dropout):
    """Relative errors of whole tensors; a stock layer under autocast is held to the same bound. Dropout draws alike."""
    shape = SHAPE._replace(out_dropout=dropout, down_dropout=dropout)
    monkeypatch.setattr(cpu_layer.F, "dropout", cpu_dropout)
    copies = Bf16Copies()

    def in_bf16(x, w, shape, documents):
        joined = (copies.of(*w[0:3]), copies.of(*w[3:6]))
        matrices = Matrices(*joined, *(copies.of(t) for t in (w.out, w.out_bias, w.up, w.up_bias, w.down, w.down_bias)))
        copies.refresh()
        return post_norm_layer(x, w, shape, documents, Bf16Products(), matrices)

    def under_autocast(x, w, shape, documents):
        with torch.autocast("cpu", torch.bfloat16):
            return post_norm_layer_reference(x, w, shape, documents)

    exact_y, exact = gradients(post_norm_layer_reference, shape)
    for function in (in_bf16, under_autocast):
        y, found = gradients(function, shape)
        assert y.dtype == torch.float32
        for ours, theirs in zip((y, *found), (exact_y, *exact)):
            assert ours.dtype == torch.float32
            size = torch.linalg.vector_norm(theirs.detach())
            # The key's bias has no gradient: what is left of it is rounding.
            assert torch.linalg.vector_norm((ours - theirs).detach()) < 0.02 * size + 0.02


@pytest.mark.skipif(not has_onednn(), reason="torch was built without oneDNN")
def test_products_by_onednn_equal_the_layer_in_steps():
    def by_onednn(x, w, shape, documents):
        return post_norm_layer(x, w, shape, documents, OnednnProducts())

    ours, theirs = gradients(by_onednn), gradients(post_norm_layer_reference)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


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
