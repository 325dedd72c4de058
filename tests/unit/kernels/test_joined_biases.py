"""Biases of several layers, gathered for all blocks at once."""

import torch

from automodel.kernels.flat_parameters import FlatParameters
from automodel.kernels.linear import JoinedBiases, joined_linear
from automodel.kernels.side_by_side import joined_view


def make_blocks(width: int = 8):
    torch.manual_seed(0)
    return [[torch.nn.Linear(width, width) for _ in range(3)] for _ in range(2)]


def flatten(blocks) -> FlatParameters:
    """As the optimizer does: matrices side by side, biases apart."""
    layers = [layer for block in blocks for layer in block]
    return FlatParameters([{"params": [m.weight for m in layers]}, {"params": [m.bias for m in layers]}])


def test_only_biases_of_one_buffer_can_be_gathered():
    blocks = make_blocks()
    assert not JoinedBiases.can_take([[m.bias for m in block] for block in blocks])
    flat = flatten(blocks)
    assert flat.n_blocks > 0
    assert JoinedBiases.can_take([[m.bias for m in block] for block in blocks])
    assert not JoinedBiases.can_take([[None, None]])


def test_they_follow_the_parameters_after_every_gathering():
    blocks = make_blocks()
    flatten(blocks)
    joined = JoinedBiases([[m.bias for m in block] for block in blocks])
    for change in (0.0, 1.5):
        with torch.no_grad():
            blocks[1][2].bias += change
        joined.gather()
        for index, block in enumerate(blocks):
            assert torch.equal(joined.of(index), torch.cat([m.bias for m in block]))


def test_a_product_with_gathered_biases_learns_the_same():
    width = 64  # so that whole blocks are neighbours
    blocks = make_blocks(width)
    flatten(blocks)
    layers = blocks[0]
    joined = JoinedBiases([[m.bias for m in block] for block in blocks])
    joined.gather()
    weights, biases = [m.weight for m in layers], [m.bias for m in layers]
    weight = joined_view(weights)
    assert weight is not None
    found = []
    for given in (None, joined.of(0)):
        x = torch.randn(5, width, generator=torch.Generator().manual_seed(1), requires_grad=True)
        y, _ = joined_linear(x, weight, weights, biases, None, given)
        gradients = torch.autograd.grad(y.square().sum(), [x, *weights, *biases])
        found.append((y.detach(), *gradients))
    torch.testing.assert_close(found[1], found[0])


def test_neighbours_in_two_storages_are_not_joined():
    """As the allocator of a GPU may place them."""
    memory = torch.arange(32, dtype=torch.float32)
    halves = [torch.frombuffer(memory.numpy(), dtype=torch.float32, count=16, offset=o).view(4, 4) for o in (0, 64)]
    assert halves[0].data_ptr() + 64 == halves[1].data_ptr()
    assert joined_view(halves) is None
    joined = joined_view([memory[:16].view(4, 4), memory[16:].view(4, 4)])
    assert joined is not None
    assert torch.equal(joined, memory.view(8, 4))
