"""A run that starts is never silent for long."""

import io
import time

from rich.console import Console

from automodel.metrics.waiting import Heartbeat, Waiting


def wait_for(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_each_part_is_named_and_told_again_while_it_goes_on():
    out = io.StringIO()
    with Waiting(Console(file=out, width=40), every_s=0.05) as waiting:
        waiting.begins("Reading the [model]")
        wait_for(lambda: out.getvalue().count("Reading the [model] … 0.") >= 2)
        waiting.begins("Loading the weights")
    said = out.getvalue().splitlines()
    assert said[0] == "[INFO] Reading the [model] …"
    assert said[-1] == "[INFO] Loading the weights …"
    time.sleep(0.2)
    assert out.getvalue().splitlines() == said, "nothing is said when the parts are over"


def test_a_terminal_gets_a_clock_that_goes_away():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, _environ={"TERM": "xterm"}, color_system=None)
    with Waiting(console) as waiting:
        waiting.begins("Reading the data")
        wait_for(lambda: "Reading the data … 0:00:00" in out.getvalue())
    assert out.getvalue().endswith("\x1b[2K")  # the line is erased
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1


def test_an_error_ends_it():
    out = io.StringIO()
    try:
        with Waiting(Console(file=out), every_s=0.05) as waiting:
            waiting.begins("Reading")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    time.sleep(0.2)
    assert out.getvalue() == "[INFO] Reading …\n"


def test_a_heartbeat_may_stop_itself():
    beats = []
    heart = Heartbeat(lambda passed: (beats.append(passed), heart.stop()), every_s=0.02)
    wait_for(lambda: beats)
    time.sleep(0.1)
    assert len(beats) == 1
