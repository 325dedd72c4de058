"""The products that are timed before a CPU's run, and what slow or missing libraries make of the figures."""

import os
import subprocess
import sys

import pytest
import torch

from automodel.kernels import cpu_products, product_speed
from automodel.kernels.product_speed import ProductSpeed, Sample, Timed, sample_of, time_products

MINILM = [(384, 384)] * 24 + [(384, 1536), (1536, 384)] * 6
SAMPLE = Sample(64, ((64, 128, 0.75), (128, 64, 0.25)))
SLOW = """
import torch
from automodel.kernels.product_speed import Sample, time_products
speed = time_products(Sample(64, ((384, 512, 1.0),))).speed(3)
print(speed.fp32, speed.bf16)
"""


MADE = product_speed.make_products


class Clock:
    """Stands where `time` is; products take the seconds that a test says, by their inputs."""

    now = 0.0
    hiccup = 0.0

    def __init__(self, seconds):
        self.seconds = seconds

    def perf_counter(self):
        return self.now

    def pass_by(self, tokens, inputs):
        self.now += self.hiccup + (self.seconds[inputs] if tokens == SAMPLE.tokens else 1.0)


@pytest.fixture
def clocked(monkeypatch):
    def make(seconds) -> Clock:
        clock = Clock(seconds)

        class Timely(cpu_products.Fp32Products):
            def linear(self, x_TI, weight_OI, bias_O):
                clock.pass_by(*x_TI.shape)

            def input_gradient(self, dy_TO, weight_OI):
                clock.pass_by(len(dy_TO), weight_OI.shape[1])

            def weight_gradient(self, dy_TO, x_TI):
                clock.pass_by(*x_TI.shape)

        monkeypatch.setattr(product_speed, "time", clock)
        monkeypatch.setattr(product_speed, "_contestants", lambda: ["fp32"])
        monkeypatch.setattr(product_speed, "make_products", lambda *how: Timely())
        return clock

    return make


def test_a_sample_has_the_products_with_the_most_work():
    sample = sample_of([*MINILM, (384, 2)], tokens=1840)
    assert sample.tokens == 512
    assert [size for *size, _ in sample.products] == [[384, 384], [384, 682], [682, 384]]
    assert [share for *_, share in sample.products] == pytest.approx([1 / 3] * 3, abs=1e-3)
    assert sample_of([], tokens=100) is None


def test_runs_that_differ_a_little_have_the_same_sample():
    assert sample_of(MINILM, 130) == sample_of(MINILM, 200.5) != sample_of(MINILM, 300)
    assert sample_of(MINILM, 3).tokens == product_speed.FEWEST_TOKENS


def test_large_matrices_are_cut_and_small_ones_are_not():
    large = sample_of([(4096, 14336), (14336, 4096)], 10_000)
    assert large.products == ((512, 512, 1.0),)
    assert sample_of([(64, 50_000)], 100).products == ((64, 4096, 1.0),)
    assert sample_of([(300, 200)], 100).products == ((300, 200, 1.0),)


def test_every_contestant_is_timed():
    timed = time_products(SAMPLE)
    for speeds in (timed.fp32, timed.onednn, timed.bf16):
        assert len(speeds) == 3
        assert min(speeds) > 0
    assert timed.casts > 0


def test_passes_are_put_together():
    timed = Timed((100.0, 50.0, 25.0), (), (400.0, 400.0, 100.0), 2.0)
    assert timed.speed(1) == ProductSpeed(100.0, 0.0, 400.0, 2.0)
    assert timed.speed(2).fp32 == pytest.approx(2 / (1 / 100 + 1 / 50))
    assert timed.speed(3) == ProductSpeed(pytest.approx(300 / 7), 0.0, 200.0, 2.0)


def test_products_count_with_their_share_of_the_work(clocked):
    clocked({64: 1.0, 128: 3.0})  # seconds, by a product's inputs; both have the same number of operations
    timed = time_products(SAMPLE)
    operations = 2 * 64 * 64 * 128 / 1e9
    assert timed.fp32 == pytest.approx([operations / (0.75 * 1.0 + 0.25 * 3.0)] * 3)


def test_the_fastest_turn_counts(monkeypatch, clocked):
    clock = clocked({64: 1.0, 128: 1.0})
    late = iter([0.0] * (product_speed.TURNS + 1) + [5.0, 0.0, 0.0, 5.0, 5.0, 0.0])
    usual = product_speed._Product.take_turn

    def with_hiccups(self):
        clock.hiccup = next(late, 0.0)
        usual(self)

    monkeypatch.setattr(product_speed._Product, "take_turn", with_hiccups)
    operations = 2 * 64 * 64 * 128 / 1e9
    assert time_products(SAMPLE).fp32 == pytest.approx([operations] * 3)


def test_a_contestant_that_is_far_slower_is_tried_with_a_small_product_only(monkeypatch):
    made = []

    class Emulated(cpu_products.Bf16Products):
        def linear(self, x_TI, weight_OI, bias_O):
            made.append(len(x_TI))
            for _ in range(300):
                super().linear(x_TI, weight_OI, bias_O)

    monkeypatch.setattr(product_speed, "make_products", lambda *how: Emulated() if how[0] == "bf16" else MADE(*how))
    timed = time_products(SAMPLE)
    assert set(made) == {product_speed.FEWEST_TOKENS}
    assert 0 < timed.bf16[0] < timed.fp32[0] / 4


def test_without_onednn_there_are_no_figures_of_it(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    speed = time_products(SAMPLE).speed(3)
    assert speed.fp32 > 0
    assert (speed.onednn, speed.bf16, speed.casts) == (0.0, 0.0, 0.0)


def test_without_its_fp32_products_there_is_bf16_still(monkeypatch):
    monkeypatch.setattr(product_speed, "has_onednn", lambda: False)
    speed = time_products(SAMPLE).speed(3)
    assert speed.onednn == 0.0
    assert speed.bf16 > 0


def test_a_product_that_torch_refuses_has_no_figure(monkeypatch):
    class Refused(cpu_products.Bf16Products):
        def input_gradient(self, dy_TO, weight_OI):
            raise RuntimeError("bf16 path needs the cpu support avx512bw")

    monkeypatch.setattr(product_speed, "make_products", lambda *how: Refused() if how[0] == "bf16" else MADE(*how))
    speed = time_products(SAMPLE).speed(3)
    assert (speed.bf16, speed.casts) == (0.0, 0.0)
    assert speed.onednn > 0


def test_random_numbers_of_the_run_stay_where_they_are():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    time_products(SAMPLE)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_native_bf16_fp32_is_faster():
    """oneDNN emulates, or refuses, what instructions it may not use."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("ONEDNN_MAX_CPU_ISA is of x86 processors with AVX2")
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SLOW], env=env, capture_output=True, text=True, check=True)
    fp32, bf16 = map(float, done.stdout.split())
    assert 0 <= bf16 < fp32 / 2  # 2 to 10 of 60 to 100 GFLOP/s on one core of a Zen 5
