"""Attention over a packed stream of short documents, forward and backward.

    out_t = Σ_s drop(softmax_s(cap(scale · q_t · k_s))) v_s    s in the document of t; s ≤ t if causal; |t − s| ≤ window
    cap(x) = c · tanh(x / c), where the family has one (Gemma 2)

torch's variable-length flash attention is made for long sequences. On documents of a few hundred tokens its backward is
four launches (a row sum, an fp32 buffer for dq to clear, the work itself in tiles of 128 × 128, a conversion of dq),
the gradients of query, key and value come back as three tensors to be joined again, and a sliding window saves little.
Here queries, keys and values are one tensor (T, (H + 2K)·D), as the joined projection left them, and so is their
gradient. Backward is the row sum and one launch of two kinds of programs: one tile of keys against all its queries
gives dk and dv, one tile of queries against all its keys gives dq. Scores are computed twice, but nothing is
accumulated through memory, so gradients are the same in every run. Tiles outside a window, or above the diagonal, are
not visited. Programs of the row sum also list the tiles that there are, those with the most to do first: with a program
for each tile that the longest document of the run could have, two in three leave at once, and the longest work begins
late (31.0 to 27.7 µs for eight documents of 170 tokens, Llama 1B). Documents should come longest first.

Dropout bits are computed, not stored. A word of Philox for each (query, head), and from it a cheap mix for each key:

    x = philox(seed; row, head, site)[0] + key · 0x9E3779B1         all in 32 bits
    x ^= x >> 16;  x *= 0x21F0AAAD;  x ^= x >> 15;  x *= 0x735A2D97            kept  ⇔  x >> 8 ≥ round(p · 2²⁴)

Shapes: T tokens, H query heads, K key heads, D head dimension; CU the boundaries of the documents, (documents + 1,).
Documents of length 0 are allowed. Every token must lie in a document, and no document may be longer than `longest`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.dispatch import HOPPER, capability, power_of_two_above, runs_triton
from automodel.kernels.philox import THRESHOLD_BITS, drop_threshold, philox
from automodel.kernels.rope import rope_reference, turn_in_place

LOG2_E = 1.4426950408889634
DELTA_ROWS = 64
KEY_STEP, MIX_A, MIX_B = 0x9E3779B1, 0x21F0AAAD, 0x735A2D97
WIDEST_HEAD = 128
ATTENTION_SITES = 10_000
"""Dropout sites of attention layers start here, after those of everything else."""
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Tiles:
    """Launch shapes: rows of a tile of queries, tile of keys, warps, stages of the loop over the other side."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    """The most a thread may have, where nothing is dropped: with 168 three programs of four warps share a processor,
    and what spills costs less than the third one gains (ModernBERT's global layers: 435 to 355 µs)."""


# By head dimension, rounded up to a power of two.
FORWARD = {16: Tiles(64, 64, 4, 2), 32: Tiles(64, 64, 4, 2), 64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 2)}
BACKWARD = {16: Tiles(64, 64, 4, 1), 32: Tiles(64, 64, 4, 1), 64: Tiles(64, 64, 4, 1, 168), 128: Tiles(64, 64, 8, 1)}
# Only with capped scores, which no other kernel has; not measured.
FORWARD[256], BACKWARD[256] = Tiles(64, 32, 8, 1), Tiles(32, 32, 8, 1)

MOST_MEMBERS = 4
GROUPED_FORWARD = {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 32, 4, 2)}
GROUPED_BACKWARD = {64: Tiles(64, 64, 4, 1), 128: Tiles(64, 64, 8, 1)}
"""Where query heads share a key head, up to `MOST_MEMBERS` of them share a tile: as many rows or twice as many, fewer
queries of each. One load of keys and values serves all, and a tile of keys has seen its queries in fewer turns. Forward
and backward in µs: Llama 1B, 1,344 tokens, 12.6 + 39.9 to 10.3 + 32.1; 16,384 tokens, 121 + 333 to 94 + 311; Qwen3 8B,
1,344 tokens, 20.8 + 102 to 15.1 + 61. Tiles of 256 rows lose, with as many warps more."""

HOPPERS_BACKWARD = BACKWARD | {128: Tiles(64, 64, 4, 1)}
HOPPERS_GROUPED_FORWARD = GROUPED_FORWARD | {64: Tiles(64, 32, 4, 3)}
HOPPERS_GROUPED_BACKWARD = {64: Tiles(128, 64, 4, 1), 128: Tiles(64, 64, 4, 2)}
"""Larger tiles, or fewer warps for as many: 115 to 74 µs for heads of 128 without groups. Elsewhere they spill. A stage
more in groups, at 16,512 tokens: forward 98.5 to 91.5 µs for heads of 64 (those of 128 lose), backward 564 to 543 for
heads of 128 (those of 64 do not feel it)."""


def forward_tiles(device: torch.device) -> tuple[dict[int, Tiles], dict[int, Tiles]]:
    """(for a head alone, for heads that share a tile)."""
    return FORWARD, HOPPERS_GROUPED_FORWARD if _is_hopper(device) else GROUPED_FORWARD


def backward_tiles(device: torch.device) -> tuple[dict[int, Tiles], dict[int, Tiles]]:
    """As `forward_tiles`."""
    return (HOPPERS_BACKWARD, HOPPERS_GROUPED_BACKWARD) if _is_hopper(device) else (BACKWARD, GROUPED_BACKWARD)


def _is_hopper(device: torch.device) -> bool:
    return capability(device) // 10 == HOPPER // 10


@dataclass(frozen=True)
class Attention:
    """One layer's attention: everything but the numbers."""

    heads: int
    key_heads: int
    head_dim: int
    scale: float
    causal: bool = False
    window: int = -1
    """How far a query sees to either side; -1: to the ends of its document."""
    dropout: float = 0.0
    site: int = 0
    """A different number for each place in the model."""
    softcap: float = 0.0
    """What scores approach and never exceed; 0: they are as they are."""

    @property
    def block(self) -> int:
        """The head dimension as a tile has it."""
        return max(16, power_of_two_above(self.head_dim))

    def launch(self, alone: dict[int, Tiles], grouped: dict[int, Tiles]) -> tuple[Tiles, int, int]:
        """(tiles, query heads of one, queries of each)."""
        members = math.gcd(self.heads // self.key_heads, MOST_MEMBERS) if self.block in grouped else 1
        tiles = (grouped if members > 1 else alone)[self.block]
        return tiles, members, tiles.queries // members


def most_tiles(tokens: int, documents: int, rows: int) -> int:
    """That documents can have: each may end in one that is not full."""
    return tokens // rows + documents


class Turned(NamedTuple):
    """Queries and keys that are rotated by their positions on the way (`rope.py`)."""

    positions_T: Tensor
    table: Tensor
    """(2, positions, D / 2), fp32."""


def can_turn(table: Tensor, how: Attention) -> bool:
    """Whether attention's backward pass can turn gradients back: whole heads turn, and fill their tile."""
    return 2 * table.shape[2] == how.head_dim == how.block <= WIDEST_HEAD


def attention_keep_mask(seed: Tensor, site: int, head: int, rows: Tensor, keys: Tensor, p: float) -> Tensor:
    """(rows, keys) of kept weights for tokens `rows` and `keys` of the stream: the bits the kernels compute."""
    word = philox(seed, (rows, torch.full_like(rows, head), torch.full_like(rows, site), torch.zeros_like(rows)))[0]
    x = (word[:, None] + (keys * KEY_STEP)[None, :]) & _LOW
    x = ((x ^ (x >> 16)) * MIX_A) & _LOW
    x = ((x ^ (x >> 15)) * MIX_B) & _LOW
    return (x >> (32 - THRESHOLD_BITS)) >= drop_threshold(p)


def attention_reference(qkv_TW: Tensor, cu_seqlens: Tensor, how: Attention, seed: Tensor | None = None) -> Tensor:
    """The definition: document by document, head by head, with the scores in memory."""
    H, K, D = how.heads, how.key_heads, how.head_dim
    q, k, v = qkv_TW.unflatten(1, (H + 2 * K, D)).split([H, K, K], dim=1)
    outputs = []
    for begin, end in pairwise(cu_seqlens.tolist()):
        rows = torch.arange(begin, end, device=qkv_TW.device)
        far = rows[:, None] - rows[None, :]
        seen = torch.ones_like(far, dtype=torch.bool)
        if how.causal:
            seen &= far >= 0
        if how.window >= 0:
            seen &= far.abs() <= how.window
        heads = []
        for head in range(H):
            key_head = head * K // H
            scores = (q[begin:end, head].float() @ k[begin:end, key_head].float().t()) * how.scale
            if how.softcap:
                scores = how.softcap * torch.tanh(scores / how.softcap)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            if how.dropout > 0.0:
                assert seed is not None
                keep = attention_keep_mask(seed, how.site, head, rows, rows, how.dropout)
                weights = torch.where(keep, weights / (1.0 - how.dropout), 0.0)
            heads.append(weights @ v[begin:end, key_head].float())
        outputs.append(torch.stack(heads, dim=1))
    return torch.cat(outputs).flatten(1).to(qkv_TW.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TW: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        how: Attention,
        seed: Tensor | None,
        positions_T: Tensor | None,
        table: Tensor | None,
    ):
        if positions_T is not None and table is not None:
            turn_in_place(qkv_TW, positions_T, table, how.heads + how.key_heads, 1.0, how.head_dim)
        out_TN, lse_HT, words_HT = _forward(qkv_TW, cu_seqlens, longest, how, seed)
        ctx.save_for_backward(qkv_TW, out_TN, lse_HT, words_HT, cu_seqlens, positions_T, table)
        ctx.how = how
        return out_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TN: Tensor):
        from automodel.kernels.attention_triton import attention_backward_kernel, attention_delta_kernel

        qkv_TW, out_TN, lse_HT, words_HT, cu_seqlens, positions_T, table = ctx.saved_tensors
        how, T = ctx.how, qkv_TW.shape[0]
        tiles, members, queries = how.launch(*backward_tiles(qkv_TW.device))
        dout_TN, delta_HT, dqkv_TW = dout_TN.contiguous(), torch.empty_like(lse_HT), torch.empty_like(qkv_TW)
        documents = len(cu_seqlens) - 1
        n_keys, n_queries = (most_tiles(T, documents, rows) for rows in (tiles.keys, queries))
        listed = torch.empty(3 * (n_keys + n_queries), dtype=torch.int32, device=qkv_TW.device)
        attention_delta_kernel[(2 * (documents + 1) + -(-T // DELTA_ROWS) * how.heads,)](
            out_TN, dout_TN, delta_HT, cu_seqlens, listed, T, documents, n_keys, n_queries,
            H=how.heads, D=how.head_dim, BLOCK_D=how.block, ROWS=DELTA_ROWS, CAUSAL=how.causal,
            BLOCK_M=queries, BLOCK_N=tiles.keys, num_warps=4,
        )  # fmt: skip
        attention_backward_kernel[(n_keys * how.key_heads + n_queries * how.heads // members,)](
            qkv_TW, dout_TN, lse_HT, delta_HT, words_HT, dqkv_TW, listed, positions_T, table,
            T, 0 if table is None else table.shape[1], n_keys, n_queries,
            how.scale, drop_threshold(how.dropout), 1.0 / (1.0 - how.dropout),
            H=how.heads, K=how.key_heads, D=how.head_dim, BLOCK_D=how.block, CAUSAL=how.causal, WINDOW=how.window,
            CAP=how.softcap,
            BLOCK_M=queries, BLOCK_N=tiles.keys, MEMBERS=members, num_warps=tiles.warps, num_stages=tiles.stages,
            maxnreg=tiles.registers if words_HT is None else None,
        )  # fmt: skip
        return dqkv_TW, None, None, None, None, None, None


def _forward(
    qkv_TW: Tensor, cu_seqlens: Tensor, longest: int, how: Attention, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs, log-sum-exp of the scores, and the random word of each query and head."""
    from automodel.kernels.attention_triton import attention_forward_kernel

    T = qkv_TW.shape[0]
    tiles, members, queries = how.launch(*forward_tiles(qkv_TW.device))
    out_TN = torch.empty((T, how.heads * how.head_dim), dtype=qkv_TW.dtype, device=qkv_TW.device)
    lse_HT = torch.empty((how.heads, T), dtype=torch.float32, device=qkv_TW.device)
    words_HT = None if seed is None else torch.empty((how.heads, T), dtype=torch.int32, device=qkv_TW.device)
    attention_forward_kernel[(-(-longest // queries), how.heads // members, len(cu_seqlens) - 1)](
        qkv_TW, out_TN, lse_HT, words_HT, cu_seqlens, seed,
        T, how.scale, how.site, drop_threshold(how.dropout), 1.0 / (1.0 - how.dropout),
        H=how.heads, K=how.key_heads, D=how.head_dim, BLOCK_D=how.block, CAUSAL=how.causal, WINDOW=how.window,
        CAP=how.softcap,
        BLOCK_M=queries, BLOCK_N=tiles.keys, MEMBERS=members, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out_TN, lse_HT, words_HT


def varlen_flash(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens: Sequence[Tensor],
    longest: Sequence[int],
    how: Attention,
) -> Tensor:
    """torch's own kernel over documents, (T, H, D). Boundaries and bounds of queries, then of keys; causal between
    unequal lengths means aligned to the ends. Its dropout draws from torch's own generator. It has no cap."""
    assert not how.softcap
    right = 0 if how.causal else how.window
    return torch.ops.aten._flash_attention_forward(
        q_THD, k_TKD, v_TKD, *cu_seqlens, *longest, how.dropout, how.causal, False,
        scale=how.scale, window_size_left=how.window, window_size_right=right,
    )[0]  # fmt: skip


def attention(
    qkv_TW: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    how: Attention,
    seed: Tensor | None = None,
    turned: Turned | None = None,
) -> Tensor:
    """(T, H·D) from queries, keys and values side by side, (T, (H + 2K)·D) contiguous. `seed`: one int64 on the device,
    read where it lies, needed for dropout. `longest` bounds the length of a document. `turned`: queries and keys are
    rotated first, in place: nobody may read qkv before or after, and `can_turn` must be true."""
    if how.dropout > 0.0 and seed is None:
        raise ValueError("attention with dropout needs `seed`, an int64 tensor on the device of qkv")
    if not runs_triton(qkv_TW):
        if turned is not None:
            qkv_TW = rope_reference(qkv_TW, *turned, how.heads + how.key_heads, head_dim=how.head_dim)
        return attention_reference(qkv_TW, cu_seqlens, how, seed)
    if how.head_dim > WIDEST_HEAD and not how.softcap:
        heads = qkv_TW.unflatten(1, (-1, how.head_dim)).split([how.heads, how.key_heads, how.key_heads], dim=1)
        return varlen_flash(*heads, (cu_seqlens, cu_seqlens), (longest, longest), how).flatten(1)
    positions_T, table = turned or (None, None)
    return _Attention.apply(qkv_TW, cu_seqlens, longest, how, seed if how.dropout > 0.0 else None, positions_T, table)
