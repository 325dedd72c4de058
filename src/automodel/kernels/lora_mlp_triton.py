"""The Triton half of `lora_mlp.py`: the gated activation with the adapters of the products around it.

A program has a tile of rows and columns. The thin matrices of the adapters are small tiles, multiplied on the way: what
an adapter adds to gate and up, or to the gradient of the activation, is never written anywhere. Programs next to each
other have the same columns, whose thin tiles stay in the cache.

Legend: ROWS and BLOCK of a tile, R and RD ranks rounded up to what tensor cores multiply.
"""

import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]

from automodel.kernels.swiglu_triton import activated
from automodel.kernels.triton_keys import settle_keys


@triton.jit
def thin_product(H, B, rows, cols, there, within, RANK: tl.constexpr, R: tl.constexpr, H_STRIDE: tl.constexpr,
                 ACROSS: tl.constexpr, ALONG: tl.constexpr):  # fmt: skip
    """A tile of H B, fp32. Of B, columns stand ACROSS elements apart and ranks ALONG."""
    ranks = tl.arange(0, R)
    wanted = ranks < RANK
    at = H + rows.to(tl.int64)[:, None] * H_STRIDE + ranks[None, :]
    h = tl.load(at, mask=there[:, None] & wanted[None, :], other=0.0)
    b = tl.load(B + ranks[:, None] * ALONG + cols[None, :] * ACROSS, mask=wanted[:, None] & within[None, :], other=0.0)
    return tl.dot(h, b)


@triton.jit
def gate_and_up(X, H, BG, BU, row, rows, cols, there, within, scale_gate, scale_up, WIDTH: tl.constexpr,
                RANK: tl.constexpr, R: tl.constexpr, UP_AT: tl.constexpr, H_STRIDE: tl.constexpr):  # fmt: skip
    """Both halves of X with what their adapters add, in fp32."""
    inside = there[:, None] & within[None, :]
    gate = tl.load(X + 2 * row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + 2 * row + WIDTH + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    gate += thin_product(H, BG, rows, cols, there, within, RANK, R, H_STRIDE, RANK, 1) * scale_gate
    up += thin_product(H + UP_AT, BU, rows, cols, there, within, RANK, R, H_STRIDE, RANK, 1) * scale_up
    return gate, up


@triton.jit(do_not_specialize=["n_rows"])
def gated_forward_kernel(
    X, H, BG, BU, Y, n_rows, scale_gate, scale_up,
    WIDTH: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, UP_AT: tl.constexpr, H_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Y (rows, WIDTH) from X (rows, 2·WIDTH), the gate half first, to which H BG and H BU are added."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, within = rows < n_rows, cols < WIDTH
    inside, row = there[:, None] & within[None, :], rows.to(tl.int64)[:, None] * WIDTH
    gate, up = gate_and_up(
        X, H, BG, BU, row, rows, cols, there, within, scale_gate, scale_up, WIDTH, RANK, R, UP_AT, H_STRIDE
    )
    act, _ = activated(gate, ACTIVATION)
    tl.store(Y + row + cols[None, :], (act * up).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def gated_backward_kernel(
    X, H, BG, BU, AD, DY, UD, n_rows, scale_gate, scale_up,
    WIDTH: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, UP_AT: tl.constexpr, H_STRIDE: tl.constexpr,
    DOWN: tl.constexpr, RD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """DY is the gradient that comes through the frozen product; the adapter's part, UD AD, is added here. In place: the
    gradients of gate and up over X, the forward result over DY. A program reads all it needs before it writes."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, within = rows < n_rows, cols < WIDTH
    inside, row = there[:, None] & within[None, :], rows.to(tl.int64)[:, None] * WIDTH
    gate, up = gate_and_up(
        X, H, BG, BU, row, rows, cols, there, within, scale_gate, scale_up, WIDTH, RANK, R, UP_AT, H_STRIDE
    )
    dy = tl.load(DY + row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    dy += thin_product(UD, AD, rows, cols, there, within, DOWN, RD, DOWN, 1, WIDTH)
    act, slope = activated(gate, ACTIVATION)
    tl.store(X + 2 * row + cols[None, :], (dy * up * slope).to(X.dtype.element_ty), mask=inside)
    tl.store(X + 2 * row + WIDTH + cols[None, :], (dy * act).to(X.dtype.element_ty), mask=inside)
    tl.store(DY + row + cols[None, :], (act * up).to(DY.dtype.element_ty), mask=inside)


settle_keys(globals())
