"""How fast this processor makes the matrix products of a run, in each precision and by each library.

    y = x Wᵀ        dx = dy W        dW = dyᵀ x        of T tokens, I inputs, O outputs: 2 T I O operations each

Which is the fastest cannot be read off the processor's flags: it depends on instructions (AMX, AVX512-BF16, or bf16
that is emulated), on the library that torch was built with and on the sizes of the products. So the run's own products
are made and timed, as `cpu_products.py` makes them: 35 to 75 ms on two cores of an AMD Zen 5, 55 to 130 on one.

- A few products stand for all, cut where they are large. On that processor 512 × 512 × 512 was made at 232, 490 and
  981 GFLOP/s (fp32, oneDNN, bf16), 1,840 × 384 × 1,536 at 213, 451 and 1,005, 1,840 × 2,048 × 2,048 at 231, 459 and
  947.
- The contestants take turns and the fastest turn counts, so that a neighbour's hiccup decides nothing. In turns they
  find cold caches, and are 10 to 20 % slower than alone.
- The first product is a small one. A contestant that takes `FAR_SLOWER` times as long as torch's own library for it
  keeps the figure of that: emulated products took 200 ms where native ones took 0.6.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from automodel.kernels.cpu_products import Library, has_onednn, make_products

MOST_PRODUCTS = 3
"""Products that stand for all of a model: mostly query and its like, up and down."""
MOST_TOKENS, FEWEST_TOKENS = 512, 16
SIDE = 512
"""Of a matrix; it has at most as many numbers as a square of this side."""
TURNS = 3
"""At least; the first of them makes kernels and fetches memory."""
BUDGET_S = 0.05
"""After which no turn begins, but for the first `TURNS`."""
CAST_TURNS = 10
FAR_SLOWER = 4.0

Contestant = Literal["fp32", "onednn", "bf16"]
CONTESTANTS: dict[Contestant, tuple[str, Library]] = {
    "fp32": ("fp32", "torch"),
    "onednn": ("fp32", "onednn"),
    "bf16": ("bf16", "torch"),
}
"""The precision and the library of fp32 products, for each figure."""
Passes = Literal[1, 2, 3]
"""What a run makes of y, dx and dW: 1 in an evaluation, 2 where weights are frozen, 3 where they are trained."""


@dataclass(frozen=True)
class ProductSpeed:
    """Speeds of a run's products, 10⁹ operations a second (GFLOP/s); a product of T × I by I × O has 2 T I O."""

    fp32: float
    """By torch's own library."""
    onednn: float = 0.0
    """In fp32 by oneDNN; 0: torch has none here."""
    bf16: float = 0.0
    """0: torch cannot."""
    casts: float = 0.0
    """10⁹ numbers a second that are cast between fp32 and bf16."""


@dataclass(frozen=True)
class Sample:
    """The products that stand for all of a run."""

    tokens: int
    products: tuple[tuple[int, int, float], ...]
    """Inputs, outputs, and the share of the work."""


@dataclass(frozen=True)
class Timed:
    """Speeds of y, dx and dW apart, 10⁹ operations a second; nothing where torch cannot."""

    fp32: tuple[float, ...]
    onednn: tuple[float, ...]
    bf16: tuple[float, ...]
    casts: float

    def to_json(self) -> dict[str, Any]:
        return {
            "fp32": list(self.fp32),
            "onednn": list(self.onednn),
            "bf16": list(self.bf16),
            "casts": self.casts,
        }

    def speed(self, passes: Passes) -> ProductSpeed:
        """Of the products that a run makes."""
        return ProductSpeed(
            *(together(speeds[:passes]) for speeds in (self.fp32, self.onednn, self.bf16)), casts=self.casts
        )


def together(speeds: tuple[float, ...]) -> float:
    """The speed of products of the same work, one after the other; 0 where there are none."""
    return len(speeds) / sum(1 / speed for speed in speeds) if speeds else 0.0


def sample_of(matrices: Iterable[tuple[int, int]], tokens: float) -> Sample | None:
    """What is timed for a model with these matrices (inputs, outputs) and micro-batches of so many tokens; none where
    it has no matrix. Numbers of tokens are cut to powers of two: runs that differ a little have the same sample."""
    work = Counter[tuple[int, int]]()
    for inputs, outputs in matrices:
        work[_cut(inputs, outputs)] += inputs * outputs
    most = work.most_common(MOST_PRODUCTS)
    total = sum(count for _, count in most)
    if not total:
        return None
    power = 2 ** (max(1, int(tokens)).bit_length() - 1)
    return Sample(
        min(max(power, FEWEST_TOKENS), MOST_TOKENS),
        tuple((inputs, outputs, round(count / total, 4)) for (inputs, outputs), count in most),
    )


def _cut(inputs: int, outputs: int) -> tuple[int, int]:
    """The part of a matrix that is timed."""
    short = min(inputs, outputs, SIDE)
    long = min(max(inputs, outputs), SIDE * SIDE // short)
    return (short, long) if inputs <= outputs else (long, short)


@torch.no_grad()
def time_products(sample: Sample, budget_s: float = BUDGET_S) -> Timed:
    """Makes the products of the sample, in turns. Draws no random number."""
    began = time.perf_counter()
    inputs, outputs, _ = sample.products[0]
    small = {name: _Product(name, FEWEST_TOKENS, inputs, outputs) for name in _contestants()}
    for _ in range(TURNS + 1):
        for name, product in list(small.items()):
            try:
                product.take_turn()
            except RuntimeError:  # torch's word for a product that this processor has not
                del small[name]
    far = FAR_SLOWER * sum(small["fp32"].seconds)
    racing = {
        name: [_Product(name, sample.tokens, *size) for *size, _ in sample.products]
        for name, product in small.items()
        if sum(product.seconds) <= far
    }
    turns = 0
    while turns < TURNS or time.perf_counter() - began < budget_s:
        turns += 1
        for contestants in zip(*racing.values()):
            for product in contestants:
                product.take_turn()
    speeds = {name: product.speeds() for name, product in small.items()}
    for name, products in racing.items():
        speeds[name] = _joined([(share, product.speeds()) for (*_, share), product in zip(sample.products, products)])
    casts = _speed_of_casts(inputs, outputs) if "bf16" in speeds else 0.0
    return Timed(speeds["fp32"], speeds.get("onednn", ()), speeds.get("bf16", ()), casts)


def _contestants() -> list[Contestant]:
    """Those that this build of torch has."""
    if not torch.backends.mkldnn.is_available():
        return ["fp32"]
    return ["fp32", "onednn", "bf16"] if has_onednn() else ["fp32", "bf16"]


class _Product:
    """y, dx and dW of one size, as a contestant makes them."""

    def __init__(self, contestant: Contestant, tokens: int, inputs: int, outputs: int):
        products = make_products(*CONTESTANTS[contestant])
        # All numbers are alike: that takes as long, and drawing them would move the run's random numbers.
        x_TI, dy_TO, weight_OI = (
            torch.full(size, 1 / 16, dtype=products.dtype, device="cpu")
            for size in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
        )
        self.makers: tuple[Callable[[], torch.Tensor], ...] = (
            lambda: products.linear(x_TI, weight_OI, None),
            lambda: products.input_gradient(dy_TO, weight_OI),
            lambda: products.weight_gradient(dy_TO, x_TI),
        )
        self.operations = 2 * tokens * inputs * outputs
        self.seconds = [math.inf] * len(self.makers)
        """Of the fastest turns."""

    def take_turn(self) -> None:
        for number, make in enumerate(self.makers):
            start = time.perf_counter()
            make()
            self.seconds[number] = min(self.seconds[number], time.perf_counter() - start)

    def speeds(self) -> tuple[float, ...]:
        return tuple(self.operations / seconds / 1e9 for seconds in self.seconds)


def _joined(shares: list[tuple[float, tuple[float, ...]]]) -> tuple[float, ...]:
    """The speeds of products one after the other, each with its share of the work."""
    passes = range(len(shares[0][1]))
    return tuple(1 / sum(share / speeds[number] for share, speeds in shares) for number in passes)


def _speed_of_casts(inputs: int, outputs: int) -> float:
    """10⁹ numbers a second."""
    wide = torch.full((outputs, inputs), 1 / 16, dtype=torch.float32, device="cpu")
    narrow = torch.empty_like(wide, dtype=torch.bfloat16)
    fastest = math.inf
    for _ in range(CAST_TURNS):
        start = time.perf_counter()
        narrow.copy_(wide)
        fastest = min(fastest, time.perf_counter() - start)
    return wide.numel() / fastest / 1e9
