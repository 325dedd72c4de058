"""Dropout masks that are computed, not stored.

A dropout mask is a pure function of a seed and of where an element stands, so the backward pass asks for it again
instead of reading it from memory, and a captured CUDA graph draws a new one on every replay because the seed lives in
a device tensor that the caller advances once per step. The generator is Philox4x32 (Salmon et al., 2011), a counter
through a few rounds of multiply and xor:

    words(row, col) = philox(key = seed, counter = (col, row // 4, site, 0))       four 32-bit words
    kept(row, col)  = words[row % 4] >> 8  >=  round(p · 2^24)

One evaluation serves four rows, which matters: at one evaluation per element the integer arithmetic of the mask takes
three times as long as the memory traffic of the whole kernel. Seven rounds are the fewest that pass BigCrush; ten is
the usual number where the seconds do not count. `site` is a number per place in the model, so that no two layers share
a mask. The same mask comes out on every device.
"""

from __future__ import annotations

import torch

ROUNDS = 7
ROWS_PER_DRAW = 4
THRESHOLD_BITS = 24

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def drop_threshold(p: float) -> int:
    """The 24-bit number below which an element is dropped."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability must be in [0, 1), got {p}")
    return round(p * (1 << THRESHOLD_BITS))


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 32×32-bit product, in int64 without overflow."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(seed: torch.Tensor, counter: tuple[torch.Tensor, ...], rounds: int = ROUNDS) -> tuple[torch.Tensor, ...]:
    """Four words per counter; int64 tensors that hold unsigned 32-bit numbers."""
    c0, c1, c2, c3 = counter
    seed = seed.reshape(())
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(rounds):
        high_a, low_a = _multiply(_MULTIPLIERS[0], c0)
        high_b, low_b = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def keep_mask(seed: torch.Tensor, site: int, rows: int, cols: int, p: float) -> torch.Tensor:
    """The (rows, cols) mask of kept elements, the same bits the kernels compute.

    For tests and for machines without Triton: exact, not fast.
    """
    groups = -(-rows // ROWS_PER_DRAW)
    col = torch.arange(cols, device=seed.device).expand(groups, cols)
    group = torch.arange(groups, device=seed.device)[:, None].expand(groups, cols)
    words = philox(seed, (col, group, torch.full_like(col, site), torch.zeros_like(col)))
    bits = torch.stack(words, dim=1).reshape(groups * ROWS_PER_DRAW, cols)[:rows]
    return (bits >> (32 - THRESHOLD_BITS)) >= drop_threshold(p)
