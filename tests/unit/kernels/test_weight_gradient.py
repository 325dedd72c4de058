"""Gradients of weights with their squares on the way, and norms that are made of whatever a pass has left."""

import pytest
import torch

from automodel.kernels import weight_gradient as ours
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.linear import joined_linear
from automodel.kernels.side_by_side import joined_view
from automodel.kernels.square_sums import UNIT, SquareSums, run_programs
from automodel.kernels.weight_gradient import (
    makes_full_rounds,
    product_programs,
    squared_product,
    tiles_of,
    weight_gradient,
    weight_gradient_reference,
)

CPU = torch.device("cpu")
WIDTH = 64
NARROW, LATE_ROWS = (32, WIDTH), (96, 64, 32)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"), [(70, 136, 264), (64, 128, 256), (130, 300, 520), (1, 8, 8), (191, 2300, 40)]
)
def test_the_product_and_its_squares(tokens, outputs, inputs):
    draw = torch.Generator().manual_seed(tokens)
    dy, x = torch.randn(tokens, outputs, generator=draw), torch.randn(tokens, inputs, generator=draw)
    gradient, squares = torch.full((outputs, inputs), float("nan")), torch.full((8,), float("nan"))
    squared_product(dy, x, gradient, squares)
    exact, total = weight_gradient_reference(dy.double(), x.double())
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-4, atol=1e-4)
    assert float(squares.double().sum()) == pytest.approx(float(total), rel=1e-5)


@pytest.mark.usefixtures("interpreter")
def test_squares_are_those_of_what_was_stored():
    """Of fp16: 2049 is rounded to 2048."""
    dy, x = torch.ones((1, 8), dtype=torch.float16), torch.full((1, 8), 2048.0, dtype=torch.float16)
    dy, x = torch.cat([dy, dy]), torch.cat([x, torch.ones_like(x)])
    gradient, squares = torch.empty((8, 8), dtype=torch.float16), torch.empty(UNIT)
    squared_product(dy, x, gradient, squares)
    assert gradient.unique().tolist() == [2048.0]
    assert float(squares.sum()) == 64 * 2048.0**2


def test_which_weights_suit(monkeypatch):
    monkeypatch.setattr(ours, "processors", lambda device: 132)
    sizes = {"o": (2048, 2048), "gate and up": (16_384, 2048), "down": (2048, 8192)}
    assert all(makes_full_rounds(*size, CPU) for size in sizes.values())
    assert not makes_full_rounds(3072, 2048, CPU), "192 tiles: the second round is half empty"
    assert not makes_full_rounds(768, 768, CPU), "18 tiles"
    assert not makes_full_rounds(16_384, 2080, CPU), "beside the last tiles there is something to be left out"
    monkeypatch.setattr(ours, "capability", lambda device: 80)
    assert not makes_full_rounds(2048, 2048, CPU), "Ampere has no engine that loads tiles"


@pytest.mark.parametrize("processors", [1, 2, 78, 114, 132, 160])
@pytest.mark.parametrize("size", [(8, 8), (2048, 2048), (16_384, 2048), (700, 700)])
def test_programs_are_whole_units_and_cover_all_tiles(monkeypatch, processors, size):
    monkeypatch.setattr(ours, "processors", lambda device: processors)
    monkeypatch.setattr("automodel.kernels.square_sums.processors", lambda device: processors)
    programs = product_programs(*size, CPU)
    assert programs % UNIT == 0 < programs <= run_programs(CPU)
    assert programs <= max(UNIT, processors)
    assert programs >= min(tiles_of(*size), processors - UNIT + 1)


def test_pieces_are_side_by_side_and_begin_anew():
    squares = SquareSums(12, CPU)
    first, second = squares.take(4), squares.take(8)
    first.fill_(1.0), second.fill_(2.0)
    assert squares.taken.tolist() == [1.0] * 4 + [2.0] * 8
    with pytest.raises(AssertionError, match="more pieces"):
        squares.take(4)
    squares.begin()
    assert squares.taken.numel() == 0
    with pytest.raises(AssertionError, match="nobody writes"):
        squares.take(3)


class Net(torch.nn.Module):
    """Three matrices that one product reads, as the blocks' do, and two parameters that are updated at once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.joined = torch.nn.ParameterList(torch.randn(rows, WIDTH) * 0.1 for rows in LATE_ROWS)
        self.last = torch.nn.Parameter(torch.randn(NARROW[0], sum(LATE_ROWS)) * 0.1)
        self.scale = torch.nn.Parameter(torch.ones(NARROW[0]))

    def forward(self, x):
        weights = list(self.joined)
        y, _ = joined_linear(x, joined_view(weights), weights)
        return (torch.nn.functional.linear(y, self.last) * self.scale).float()


def make(late, clipped=0.5, **options):
    net = Net()
    optimizer = FlatAdamW(
        [{"params": list(net.parameters())}], lr=1e-2, max_norm=clipped, copy_dtype=torch.float16,
        late=[list(net.joined)] if late else [], **options,
    )  # fmt: skip
    return net, optimizer


def count_calls(monkeypatch):
    """Names of the ways in which squares are summed up where a gradient is made, in order."""
    calls = []
    for name in ("squared_product", "sum_run"):
        real = getattr(ours, name)
        monkeypatch.setattr(ours, name, lambda *args, name=name, real=real: calls.append(name) or real(*args))
    return calls


def train(net, optimizer, lengths):
    norms = []
    for step, tokens in enumerate(lengths):
        for part in range(len(optimizer.flat.late_parts)):
            optimizer.update_late(part)
        draw = torch.Generator().manual_seed(step)
        net(torch.randn(tokens, WIDTH, generator=draw).half()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.grad_norm))
    optimizer.settle()
    return norms, [w.clone() for w in optimizer.full_precision_weights(net).values()]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("inside", [True, False], ids=["in the product", "behind it"])
def test_norms_and_weights_are_those_without_it(monkeypatch, inside):
    """Also where steps take turns of which only some leave their squares: nothing of an earlier one is counted."""
    lengths = [20, 40, 20, 41, 7, 39]
    plain = train(*make(late=False), lengths)
    calls = count_calls(monkeypatch)
    monkeypatch.setattr(ours, "makes_full_rounds", lambda *size: inside)
    monkeypatch.setattr(ours, "MOST_TOKENS", 30)
    norms, weights = train(*make(late=True), lengths)
    assert calls == ["squared_product" if inside else "sum_run"] * 3, "of the steps of 20, 20 and 7 tokens"
    assert norms == pytest.approx(plain[0], rel=1e-4)
    assert min(norms) > 0.5, "clipped"
    for mine, theirs in zip(weights, plain[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("interpreter")
def test_a_pass_that_was_given_up_leaves_nothing(monkeypatch):
    monkeypatch.setattr(ours, "makes_full_rounds", lambda *size: True)
    net, optimizer = make(late=True)
    x = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(0)).half()
    net(x).square().sum().backward()
    squares = optimizer.device_state.squares
    assert squares.used > 0
    assert squares.known == {id(p) for p in net.joined}
    optimizer.zero_grad()
    assert (squares.used, squares.known) == (0, set())
    assert train(net, optimizer, [9])[0] == pytest.approx(train(*make(late=False), [9])[0], rel=1e-4)


@pytest.mark.usefixtures("interpreter")
def test_a_weight_that_has_a_gradient_already_is_looked_at_as_a_whole(monkeypatch):
    monkeypatch.setattr(ours, "makes_full_rounds", lambda *size: True)
    net, optimizer = make(late=True)
    weights = list(net.joined)
    weights[1].grad = torch.zeros_like(weights[1])
    dy, x = torch.randn(5, sum(LATE_ROWS)).half(), torch.randn(5, WIDTH).half()
    weight_gradient(dy, x, weights)
    assert not optimizer.device_state.squares.known


def test_who_wants_no_norm_or_sums_over_ranks_first_gets_no_squares():
    def asked(net):
        return ["gradient_squares" in p.__dict__ for p in net.parameters()]

    net, optimizer = make(late=True)
    assert asked(net) == [False, False, True, True, True]
    assert all(p.gradient_squares is optimizer.device_state.squares for p in net.joined)
    assert not any(asked(make(late=True, clipped=None)[0]))
    assert not any(asked(make(late=True, placed=True)[0]))
    FlatAdamW([{"params": list(net.parameters())}], lr=1e-2, max_norm=1.0)
    assert not any(asked(net)), "those of an earlier optimizer go with it"
    assert not any("gradient_place" in p.__dict__ for p in net.parameters())
