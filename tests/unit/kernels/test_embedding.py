"""Embedding gradients without sorting on the device, against torch's."""

import numpy as np
import pytest
import torch

from automodel.data.collate import _runs
from automodel.kernels.column_sum import rows_sum
from automodel.kernels.embedding import embedding_reference, position_embedding, word_embedding
from automodel.kernels.linear import joined_linear, joined_linear_reference
from automodel.kernels.rope import rope_, rope_reference, rope_table


def test_runs_cover_every_token_once():
    ids = np.array([5, 3, 5, 5, 0, 3, 9])
    order, lengths = _runs(ids)
    assert ids[order].tolist() == sorted(ids.tolist())
    assert lengths.tolist() == [1, 2, 0, 3, 0, 0, 1]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("width", [16, 40])
def test_word_gradient_equals_torch(width):
    generator = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.randint(0, 12, (20,), generator=generator), torch.full((13,), 7), torch.zeros(3).long()])
    weight = torch.randn(15, width, generator=generator, requires_grad=True)
    twin = weight.detach().clone().requires_grad_()
    upstream = torch.randn(len(ids), width, generator=generator)
    runs = torch.from_numpy(_runs(ids.numpy()))
    ours = word_embedding(ids, weight, runs, padding_id=0)
    theirs = embedding_reference(ids, twin, 0)
    torch.testing.assert_close(ours, theirs)
    ours.backward(upstream)
    theirs.backward(upstream)
    torch.testing.assert_close(weight.grad, twin.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_word_gradients_are_added_to_those_that_are_there(dtype):
    """Of a tied head, or of the micro-batches before: in place, padding's row untouched."""
    ids = torch.tensor([3, 5, 3, 0, 9] + [7] * 12)
    weight = torch.randn(15, 24).to(dtype).requires_grad_()
    before = torch.randn(15, 24).to(dtype)
    weight.grad = place = before.clone()
    upstream = torch.randn(len(ids), 24).to(dtype)
    word_embedding(ids, weight, torch.from_numpy(_runs(ids.numpy())), padding_id=0).backward(upstream)
    assert weight.grad is place
    expected = before.float()
    for token, row in zip(ids.tolist(), upstream.float()):
        expected[token] += row if token else 0.0
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(place.float(), expected, rtol=bound, atol=bound)
    assert torch.equal(place[0], before[0])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("offset", [0, 2])
def test_position_gradient_equals_torch(offset):
    lengths = [4, 1, 7, 3, 0, 0]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths]) + offset
    weight = torch.randn(12, 24, requires_grad=True)
    twin = weight.detach().clone().requires_grad_()
    upstream = torch.randn(len(positions), 24)
    position_embedding(positions, weight, cu_seqlens, offset).backward(upstream)
    embedding_reference(positions, twin).backward(upstream)
    torch.testing.assert_close(weight.grad, twin.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("shape", [(3, 130), (200, 64)])
def test_rows_sum_equals_torch(shape):
    x = torch.randn(shape)
    torch.testing.assert_close(rows_sum(x), x.sum(0), rtol=1e-5, atol=1e-4)


def test_joined_linear_equals_separate_layers_and_adds_the_stream_around():
    torch.manual_seed(0)
    storage = torch.randn(9, 4)
    weights = [storage[i : i + 3].detach().requires_grad_() for i in (0, 3, 6)]
    biases = [torch.randn(3, requires_grad=True) for _ in weights]
    x = torch.randn(5, 4, requires_grad=True)
    y, around = joined_linear(x * 1.0, storage, weights, biases)
    (y.square().sum() + (around * 3).sum()).backward()
    ours = [x.grad, *[w.grad for w in weights], *[b.grad for b in biases]]
    twins = [t.detach().clone().requires_grad_() for t in (x, *weights, *biases)]
    reference = joined_linear_reference(twins[0], twins[1:4], twins[4:])
    torch.testing.assert_close(y, reference)
    (reference.square().sum() + (twins[0] * 3).sum()).backward()
    for got, twin in zip(ours, twins):
        torch.testing.assert_close(got, twin.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["reference", "interpreter"])
def test_rope_turns_in_place_and_its_gradient_back(where, request):
    if where == "interpreter":
        request.getfixturevalue("interpreter")
    torch.manual_seed(0)
    table = rope_table(1.0 / 10_000 ** (torch.arange(0, 8, 2) / 8), 16)
    positions = torch.tensor([0, 1, 2, 0, 1, 9])
    x = torch.randn(6, 5 * 8, requires_grad=True)
    upstream = torch.randn(6, 40)
    y = rope_(x * 1.0, positions, table, turning=3)
    torch.testing.assert_close(y, rope_reference(x.detach(), positions, table, 3))
    assert torch.equal(y[:, 24:], x[:, 24:])
    y.backward(upstream.clone())
    twin = x.detach().clone().requires_grad_()
    rope_reference(twin, positions, table, 3).backward(upstream)
    torch.testing.assert_close(x.grad, twin.grad)
