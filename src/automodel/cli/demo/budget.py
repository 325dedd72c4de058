"""How many reviews fit into the minutes a person has, on the machine they have.

One number about the machine is measured: how fast it multiplies matrices of MiniLM's size, forward and backward, for
a second. What a token of training costs in such products is known from the model's size, and how much of the
machine's matrix speed a whole training step reaches was measured once (`SHARE`). Reading a held-out review costs a
third of training on one. A quarter of the time is left for what nobody can predict.
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
LEAST = 600  # 500 reviews reached 0.853, 400 only 0.803 and 300 0.676: below this the minutes are wasted


def reviews_for(minutes: float, held_out: int, most: int, matrix_flops: float | None) -> int:
    """Training reviews for these minutes: in proportion to the full recipe, fewer on a slow machine.

    `matrix_flops` is the machine's speed; None stands for a GPU, which is never too slow.
    """
    wanted = min(most, int(FULL_RECIPE * minutes / FULL_MINUTES))
    if matrix_flops is not None:
        tokens_per_second = SHARE * matrix_flops / FLOPS_OF_A_TOKEN
        seconds = max(0.0, MARGIN * 60 * minutes - FIXED_SECONDS)
        wanted = min(wanted, int(seconds * tokens_per_second / TOKENS_OF_A_REVIEW - held_out / 3))
    return max(LEAST, wanted // 100 * 100)


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
