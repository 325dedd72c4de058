"""Gradients made on a second stream are whole, however late the device is, and so is what they are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from automodel.kernels.side_stream import PIECES, SideStream, hand_on, open_stream
from late_device import Device

LAYERS = 3 * PIECES


def summed_up(monkeypatch, seed: int, ignored: str = "", forget: bool = False) -> bool:
    """Whether the optimizer found every layer's gradient, in several steps. The activations that gradients are made of
    are dropped by the main stream as soon as it is done with them; `forget`: nobody else holds them, either."""
    device, found = Device(seed, ignored), []
    with monkeypatch.context() as patch:
        device.install(patch)
        main, side = device.stream, SideStream()
        weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(LAYERS)]
        for step in range(4):
            for layer, weight in enumerate(weights):
                activation = torch.zeros(3)
                device.put(lambda made=activation, value=100 * step + layer: made.fill_(value))
                read = device.own(activation)

                def gradients(activation=activation) -> list[Tensor]:
                    assert device.stream is side.stream
                    gradient = torch.zeros_like(activation)
                    made = device.own(gradient)
                    device.put(lambda: gradient.copy_(activation * 2))
                    return [made]

                side.give([weight], gradients, *([] if forget else [read]))
                del read
                device.work(device.chance.choice([0, 1, 5]))
            assert len(side.pieces) <= PIECES
            side.join()
            assert device.stream is main
            for layer, weight in enumerate(weights):
                there, wanted = weight.grad.as_subclass(Tensor), 2.0 * (100 * step + layer)
                device.put(lambda there=there, wanted=wanted: found.append(bool((there == wanted).all())))
                weight.grad = None
        device.work(100_000)
    assert len(found) == 4 * LAYERS
    return all(found)


def test_every_gradient_is_there(monkeypatch):
    assert all(summed_up(monkeypatch, seed) for seed in range(20))


def test_pieces_hold_what_they_read_and_are_waited_for(monkeypatch):
    assert not all(summed_up(monkeypatch, seed, forget=True) for seed in range(10))
    assert not all(summed_up(monkeypatch, seed, ignored="wait") for seed in range(10))


def test_a_stream_that_was_handed_on_is_taken_before_a_new_one_is_made(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority=0: made.append(priority) or object())
    first = open_stream(-1)
    hand_on(first, -1)
    assert open_stream() is not first, "of another priority"
    assert open_stream(-1) is first
    assert open_stream(-1) is not first, "somebody has it"
    assert made == [-1, 0, -1]
