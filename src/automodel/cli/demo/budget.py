"""How many reviews fit into the minutes a person has, on the machine they have.

One number about the machine is measured: how fast it multiplies matrices of MiniLM's size, forward and backward, for
a second. What a token of training costs in such products is known from the model's size, and how much of the
machine's matrix speed a whole training step reaches was measured once (`SHARE`). Reading a held-out review costs a
third of training on one, so fewer are held out where there are few minutes. A quarter of the time is left for what
cannot be predicted.
"""

from __future__ import annotations

import time

FLOPS_OF_A_TOKEN = 6 * 10.6e6  # forward and backward, for the 10.6M parameters that multiply
SHARE = 0.6  # of the matrix speed below that a training step reached: 1,280 tokens/s a core at 135 GFLOP/s
TOKENS_OF_A_REVIEW = 115
FIXED_SECONDS = 35  # imports, reading, tokenising, loading, saving, the report
MARGIN = 0.75
FULL_RECIPE = 2_000  # training reviews in `FULL_MINUTES`
FULL_MINUTES = 4.0
EVALUATION = 1 / 3  # of training on a review: 45 s for 320 reviews whose training took 142 s
HELD_OUT_A_MINUTE, FEWEST_HELD_OUT, MOST_HELD_OUT = 250, 200, 1_000
LEAST = 600  # 500 reviews reached 0.853, 400 only 0.803 and 300 0.676: below this the minutes are wasted


def reviews_for(minutes: float, held_out: int, most: int, matrix_flops: float | None) -> int:
    """Training reviews for these minutes: in proportion to the full recipe, fewer on a slow machine.

    `matrix_flops` is the machine's speed; None stands for a GPU, which is never too slow.
    """
    wanted = min(most, int(FULL_RECIPE * minutes / FULL_MINUTES))
    if matrix_flops is not None:
        seconds = max(0.0, MARGIN * 60 * minutes - FIXED_SECONDS)
        wanted = min(wanted, int(seconds * _reviews_a_second(matrix_flops) - held_out * EVALUATION))
    return max(LEAST, wanted // 100 * 100)


def held_out_for(minutes: float) -> int:
    """Reviews to measure on, half of each kind: the measuring is part of the minutes."""
    return max(FEWEST_HELD_OUT, min(MOST_HELD_OUT, int(HELD_OUT_A_MINUTE * minutes) // 2 * 2))


def minutes_for(reviews: int, held_out: int, matrix_flops: float) -> float:
    """How long the whole command takes on such a machine, training, measuring and all the rest."""
    work = (reviews + held_out * EVALUATION) / _reviews_a_second(matrix_flops)
    return (FIXED_SECONDS + work) / MARGIN / 60


def _reviews_a_second(matrix_flops: float) -> float:
    return SHARE * matrix_flops / FLOPS_OF_A_TOKEN / TOKENS_OF_A_REVIEW


def matrix_flops(seconds: float = 1.0) -> float | None:
    """Floating-point operations a second in MiniLM's largest products; None on a GPU."""
    import torch

    if torch.cuda.is_available():
        return None
    tokens, hidden, inner = 2048, 384, 1536
    x = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(hidden, inner, requires_grad=True)
    gradient = torch.randn(tokens, inner)
    (x @ weight).backward(gradient)
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        (x @ weight).backward(gradient)
        steps += 1
    return steps * 6 * tokens * hidden * inner / (time.perf_counter() - started)
