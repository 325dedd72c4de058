"""Rates against a clock that the test turns."""

import numpy as np

from automodel.metrics.throughput import Counts, MemoryMeter, Throughput, memory_gib


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_rates_leave_out_pauses():
    clock = Clock()
    counter = Throughput(clock=clock)
    for _ in range(4):
        clock.now += 0.5
        counter.update(samples=8, tokens=1000)
        counter.pause()
        clock.now += 60.0  # evaluation
        counter.resume()
    assert counter.rates(counter.counts) == {"tokens_per_s": 2000.0, "samples_per_s": 16.0, "steps_per_s": 2.0}
    assert counter.train_s == 2.0
    assert counter.counts == Counts(4, 32, 4000)


def test_the_window_forgets_a_slow_start():
    clock = Clock()
    counter = Throughput(window=5, clock=clock)
    clock.now += 100.0  # compiling
    counter.update(samples=1, tokens=10)
    assert counter.rates(counter.counts)["steps_per_s"] == 0.01
    for _ in range(5):
        clock.now += 1.0
        counter.update(samples=1, tokens=10)
    assert counter.rates(counter.counts)["steps_per_s"] == 1.0


def test_steps_that_are_only_queued_do_not_count():
    """The host is eight steps ahead: a rate is about what is done."""
    clock = Clock()
    counter = Throughput(clock=clock)
    for _ in range(2):
        counter.update(samples=8, tokens=1000)
    done = counter.counts
    for _ in range(8):
        counter.update(samples=8, tokens=1000)
    clock.now += 4.0
    assert counter.rates(done) == {"tokens_per_s": 500.0, "samples_per_s": 4.0, "steps_per_s": 0.5}
    clock.now += 4.0
    assert counter.rates(counter.counts)["steps_per_s"] == 1.25


def test_time_stands_still_while_paused_and_pausing_twice_is_harmless():
    clock = Clock()
    counter = Throughput(clock=clock)
    clock.now += 1.0
    counter.pause()
    clock.now += 5.0
    counter.pause()
    clock.now += 5.0
    assert counter.train_s == 1.0
    counter.resume()
    counter.resume()
    clock.now += 1.0
    assert counter.train_s == 2.0


def test_nothing_done_yet_is_zero():
    counter = Throughput(clock=Clock())
    assert counter.rates(counter.counts)["tokens_per_s"] == 0.0


def test_host_memory_grows_with_what_is_held_and_the_peak_stays():
    meter = MemoryMeter("cpu")
    before = meter.read()
    held = np.ones(2**25)  # 256 MiB
    during = meter.read()
    del held
    after = meter.read()
    assert during - before > 0.2
    assert meter.peak_gib == max(before, during, after)
    assert 0.0 < memory_gib("cpu") < 100.0
