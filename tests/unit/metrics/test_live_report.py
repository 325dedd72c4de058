"""`report.html` is there from the first log line on, says that the run goes on, and does not eat its time."""

import itertools
import time

import pytest

from automodel.metrics import live_report
from automodel.metrics.jsonl import JsonlTracker
from automodel.metrics.live_report import LiveReport
from automodel.metrics.report import write_report
from automodel.metrics.trackers import Trackers


def wait_for(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def begin(folder, **options):
    trackers = Trackers([JsonlTracker(folder / "metrics.jsonl"), LiveReport(**options)])
    (folder / "summary.json").write_text('{"status": "interrupted", "wall_s": 9999.0}')  # of an earlier part
    trackers.start(folder, {}, {})
    return trackers


def test_it_is_there_after_the_first_line(tmp_path):
    trackers = begin(tmp_path)
    assert not (tmp_path / "report.html").exists()
    trackers.log(1, {"loss": 0.5})
    wait_for((tmp_path / "report.html").exists)
    page = (tmp_path / "report.html").read_text()
    assert "running, as of 20" in page
    assert 'http-equiv="refresh"' in page
    assert "interrupted" not in page
    assert "9999" not in page
    trackers.finish({})
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    page = write_report(tmp_path).read_text()
    assert ">finished<" in page
    assert "refresh" not in page


def test_it_is_made_seldom_and_never_again_after_the_end(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(live_report, "write_report", lambda *a, **k: made.append(time.monotonic()))
    trackers = begin(tmp_path, every_s=0.2)
    until = time.monotonic() + 1.0
    step = 0
    while time.monotonic() < until:
        step += 1
        trackers.log(step, {"loss": 0.5})
        time.sleep(0.001)
    trackers.finish({})
    assert 2 <= len(made) <= 6
    assert all(later - earlier >= 0.2 for earlier, later in itertools.pairwise(made))


def test_a_page_that_takes_long_is_made_less_often(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(live_report, "write_report", lambda *a, **k: (made.append(1), time.sleep(0.05)))
    trackers = begin(tmp_path, every_s=0.0)
    for step in range(50):
        trackers.log(step, {"loss": 0.5})
        time.sleep(0.01)
    trackers.finish({})
    assert len(made) == 1  # the next one would have come five seconds later


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), PermissionError(13, "denied"), KeyError("a line of another form")]
)
def test_a_page_that_cannot_be_made_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch, error):
    def refuse(*_args, **_options):
        raise error

    monkeypatch.setattr(live_report, "write_report", refuse)
    trackers = begin(tmp_path)
    warned = []
    trackers.warn = warned.append
    trackers.log(1, {"loss": 0.5})
    live = trackers.sinks[1]
    wait_for(lambda: live._error is not None)
    trackers.log(2, {"loss": 0.5})
    trackers.log(3, {"loss": 0.5})
    trackers.finish({})
    assert len(warned) == 1
    assert "report.html could not record" in warned[0]
