"""Flat gradients at fixed places: every number belongs to one piece, and the update is torch's AdamW with clipping."""

import pytest
import torch
from torch import nn

from automodel.engine import gradient_pieces
from automodel.engine.gradient_pieces import GradientPieces
from automodel.kernels.flat_adamw import FlatAdamW


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(4))
        self.head = nn.Linear(64, 50)
        self.unused = nn.Linear(8, 8)

    def forward(self, ids):
        x = self.words(ids)
        for block in (*self.blocks, self.blocks[0]):  # one block runs twice
            x = x + torch.tanh(block(x))
        return self.head(x).square().mean()


def made(**options):
    model = Model()
    groups = [{"params": [p for p in model.parameters() if p.ndim == 2]}]
    groups.append({"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0})
    return model, FlatAdamW(groups, lr=1e-2, max_norm=0.1, **options)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(gradient_pieces, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(gradient_pieces, "SMALLEST_BYTES", 1 << 13)
    monkeypatch.setattr(gradient_pieces, "LARGEST_BYTES", 1 << 14)


@pytest.mark.parametrize("form", ["placed", "flat_gradients"])
def test_every_gradient_is_in_one_piece(form):
    model, optimizer = made(**{form: True})
    pieces = GradientPieces(optimizer, model.blocks, None, placed=form == "placed", behind=[model.head.weight])
    assert len(pieces.early) == 2
    assert [id(b) in pieces.early[0].blocks for b in model.blocks] == [False, False, True, True]
    assert id(model.head.weight) in [id(place.parameter) for place in pieces.early[0].places]
    for buffer in optimizer.flat.fixed_buffers:
        buffer.zero_()
    for tensor in pieces.as_they_come(lambda: None):
        tensor += 1
    for place in optimizer.flat.places:
        assert (optimizer.flat.fixed[id(place.parameter)] == 1).all()
    assert all(tensor.nbytes <= 1 << 14 for tensor in pieces.rest.ranges)


def test_a_block_that_runs_twice_is_done_after_its_first_run():
    model, optimizer = made(placed=True)
    pieces = GradientPieces(optimizer, model.blocks, None, placed=True)
    when = []
    for number, piece in enumerate(pieces.early):
        piece.mark.record = lambda number=number: when.append(number)
    with pieces.pass_of():
        model(torch.arange(10)).backward()
    assert when == [0, 1]
    assert pieces.came_early == 2
    fresh = Model()
    fresh(torch.arange(10)).backward()
    wanted = dict(fresh.named_parameters())
    for name, parameter in model.named_parameters():
        if wanted[name].grad is not None:
            torch.testing.assert_close(optimizer.flat.fixed[id(parameter)], wanted[name].grad)
    pieces.remove()
    assert not any(block._forward_pre_hooks for block in model.blocks)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_collected_is_what_adamw_takes(late):
    truth = Model()
    torch_groups = [{"params": [p for p in truth.parameters() if p.ndim == 2]}]
    torch_groups.append({"params": [p for p in truth.parameters() if p.ndim == 1], "weight_decay": 0.0})
    reference = torch.optim.AdamW(torch_groups, lr=1e-2, eps=1e-3)  # or rounding decides on signs
    model = Model()
    groups = [{"params": [p for p in model.parameters() if p.ndim == 2]}]
    groups.append({"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0})
    parts = [[block[0].weight] for block in model.blocks] if late else []
    optimizer = FlatAdamW(groups, lr=1e-2, eps=1e-3, max_norm=0.1, placed=True, late=parts)
    pieces = GradientPieces(optimizer, model.blocks, None, placed=True)
    for step in range(5):
        ids = torch.arange(step, step + 9)
        for part in range(len(parts)):
            optimizer.update_late(part)
        with pieces.pass_of():
            model(ids).backward()
        optimizer.zero_grad(set_to_none=True)
        optimizer.hand_out()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        truth(ids).backward()
        nn.utils.clip_grad_norm_(truth.parameters(), 0.1)
        reference.step()
        reference.zero_grad()
    optimizer.settle()
    assert torch.equal(model.unused.weight, truth.unused.weight), "what never has a gradient does not decay"
    for one, other in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(one, other)
