"""The recorder: what counts as a step, what as steady state, what is left out."""

import time

import pytest
import torch

from automodel.benchmark.own_side import StepWatch
from automodel.benchmark.recorder import Recorder, quantile


def record(recorder: Recorder, steps: int, *, seconds=0.002, pauses=(), slow=()) -> None:
    for step in range(1, steps + 1):
        recorder.begin()
        time.sleep(seconds * (10 if step in slow else 1))
        recorder.count(tokens=10, samples=2)
        recorder.end(torch.tensor(float(step)), pause=step in pauses)
        if step in pauses:
            time.sleep(0.05)  # an evaluation
    recorder.finish()


def test_steps_losses_and_counts():
    recorder = Recorder("cpu", warmup=2, started=time.monotonic())
    record(recorder, 10)
    numbers = recorder.numbers(steps_per_epoch=5)
    assert numbers["losses"] == [float(i) for i in range(1, 11)]
    assert numbers["steps"] == 10
    assert numbers["steady_steps"] == 8
    assert numbers["tokens"] == 100
    assert numbers["samples"] == 20
    assert numbers["tokens_per_s"] == pytest.approx(5 * numbers["samples_per_s"])
    assert numbers["seconds_per_epoch"] == pytest.approx(5 / numbers["steps_per_s"])
    assert numbers["ms_p20"] <= numbers["ms_per_step"] <= numbers["ms_p80"]
    assert 0 < numbers["first_step_s"] < 5


def test_an_evaluation_between_steps_is_in_nobodys_time():
    recorder = Recorder("cpu", warmup=1, started=time.monotonic())
    record(recorder, 12, pauses=(4, 8))
    numbers = recorder.numbers(steps_per_epoch=12)
    assert max(numbers["step_ms"]) < 45, "a pause of 50 ms was counted as a step"
    assert numbers["train_s"] < 0.09, "two pauses of 50 ms were counted as training"
    assert [s.steps for s in recorder.stretches] == [1, 3, 4, 4]


def test_waiting_for_data_belongs_to_the_step_that_waited():
    recorder = Recorder("cpu", warmup=1, started=time.monotonic())
    for _ in range(3):
        recorder.begin()
        recorder.end(torch.zeros(()))
        time.sleep(0.02)
    recorder.finish()
    assert min(recorder.step_ms()[2:]) > 15


def test_warmup_is_left_out_of_the_steady_state():
    recorder = Recorder("cpu", warmup=3, started=time.monotonic())
    record(recorder, 9, seconds=0.003, slow=(1, 2, 3))
    numbers = recorder.numbers(steps_per_epoch=9)
    assert numbers["steady_steps"] == 6
    assert numbers["ms_mean"] < 15
    assert max(numbers["step_ms"][:3]) > 25


def test_a_run_shorter_than_its_warmup_still_has_numbers():
    recorder = Recorder("cpu", warmup=10, started=time.monotonic())
    record(recorder, 3)
    assert recorder.numbers(steps_per_epoch=3)["steady_steps"] == 2
    single = Recorder("cpu", warmup=10, started=time.monotonic())
    record(single, 1)
    assert single.numbers(steps_per_epoch=1)["steady_steps"] == 1


def test_a_loop_without_a_step_is_an_error():
    recorder = Recorder("cpu", warmup=1, started=time.monotonic())
    recorder.finish()
    with pytest.raises(RuntimeError, match="without a step"):
        recorder.numbers(steps_per_epoch=1)


def test_losses_are_copies_since_a_captured_step_reuses_its_place():
    recorder, place = Recorder("cpu", warmup=1, started=time.monotonic()), torch.zeros(())
    for value in (3.0, 2.0):
        recorder.begin()
        place.fill_(value)
        recorder.end(place)
    recorder.finish()
    assert recorder.losses() == [3.0, 2.0]


def test_quantiles():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.2) == 2.0
    assert quantile([5.0], 0.8) == 5.0


class DeviceClock:
    """A device that works on its own: the host queues, `work` takes device time, events are stamps in its stream."""

    def __init__(self, monkeypatch):
        self.now, self.waits = 0.0, 0
        clock = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing
                self.at = None

            def record(self):
                self.at = clock.now

            def elapsed_time(self, end):
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def wait(self):
        self.waits += 1


def test_on_a_gpu_steps_are_timed_by_events_and_the_host_rarely_waits(monkeypatch):
    device = DeviceClock(monkeypatch)
    recorder = Recorder("cuda", warmup=3, started=time.monotonic())
    for step in range(1, 41):
        recorder.begin()
        device.now += 50.0 if step == 1 else 2.0 + step / 100
        recorder.end(torch.zeros(()), pause=step == 20)
        if step == 20:
            device.now += 500.0  # an evaluation
    waits = device.waits
    recorder.finish()
    times = recorder.step_ms()
    assert times[0] == 50.0
    assert times[19] == pytest.approx(2.2)
    assert times[20] == pytest.approx(2.21), "the evaluation was counted as a step"
    assert waits <= 8, "the host waited inside a stretch"
    assert [s.steps for s in recorder.stretches] == [1, 2, 17, 20]


def test_our_clock_starts_when_the_model_is_there():
    """What is tried before the first step is training, however often it has to be tried."""
    watch = StepWatch(Recorder("cpu", warmup=0, started=time.monotonic()))
    watch.model_loaded()
    first = watch.recorder.marks["loop_start_s"]
    time.sleep(0.01)
    watch.model_loaded()
    assert watch.recorder.marks["loop_start_s"] == first
