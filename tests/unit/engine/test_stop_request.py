"""Signals ask for a stop; on several ranks one of them may come when all have agreed to stop already."""

import os
import signal
from types import SimpleNamespace

import pytest

from automodel.engine.signals import StopRequest

NUMBER = signal.SIGUSR1


@pytest.fixture
def heard():
    """What reaches the handler of before; without one, SIGUSR1 would end this process."""
    found = []
    before = signal.signal(NUMBER, lambda number, frame: found.append(number))
    yield found
    signal.signal(NUMBER, before)


def ranks(asked: int) -> SimpleNamespace:
    return SimpleNamespace(highest=lambda own: max(own, asked))


def send() -> None:
    os.kill(os.getpid(), NUMBER)


def test_the_first_signal_asks_and_the_second_is_not_ours(heard):
    with StopRequest() as stop:
        assert stop.agreed(ranks(0)) is None
        send()
        assert stop.agreed(ranks(0)) == "SIGUSR1"
        assert not heard
        send()
        assert heard == [NUMBER]
    send()
    assert heard == [NUMBER] * 2


def test_a_rank_that_agreed_waits_for_its_own_signal(heard):
    """The others' came first, and it has stopped with them: its own must not end it on its way out."""
    with StopRequest() as stop:
        assert stop.agreed(ranks(NUMBER)) == "SIGUSR1"
    send()
    assert not heard
    send()
    assert heard == [NUMBER]


def test_nothing_is_waited_for_where_nobody_was_asked(heard):
    with StopRequest() as stop:
        assert stop.agreed(ranks(0)) is None
    send()
    assert heard == [NUMBER]
