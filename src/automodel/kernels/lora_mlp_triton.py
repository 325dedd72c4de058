"""The Triton half of `lora_mlp.py`: the gated activation with the adapters of the products around it.

A program walks along the columns of a few rows. The thin matrices of the adapters are small tiles, multiplied on the
way: what an adapter adds to gate and up, or to the gradient of the activation, is never written anywhere.

Legend: ROWS rows of a program, BLOCK columns at a time, R and RD ranks rounded up to what tensor cores multiply.
"""

import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]

from automodel.kernels.swiglu_triton import activated
from automodel.kernels.triton_keys import settle_keys


@triton.jit
def tall(POINTER, rows, ranks, inside, RANK: tl.constexpr, STRIDE: tl.constexpr):
    """Rows of a thin matrix, zeros behind its rank."""
    places = POINTER + rows.to(tl.int64)[:, None] * STRIDE + ranks[None, :]
    return tl.load(places, mask=inside[:, None] & (ranks < RANK)[None, :], other=0.0)


@triton.jit
def flat(POINTER, ranks, cols, inside, RANK: tl.constexpr, STRIDE: tl.constexpr):
    """The same, lying: (rank, columns)."""
    places = POINTER + ranks[:, None] * STRIDE + cols[None, :]
    return tl.load(places, mask=(ranks < RANK)[:, None] & inside[None, :], other=0.0)


@triton.jit(do_not_specialize=["n_rows"])
def gated_forward_kernel(
    X, H, BG, BU, AD, Y, HD, n_rows, scale_gate, scale_up,
    WIDTH: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, UP_AT: tl.constexpr, H_STRIDE: tl.constexpr,
    DOWN: tl.constexpr, RD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Y (rows, WIDTH) from X (rows, 2·WIDTH), the gate half first, to which the adapters are added: H times BG and BU.
    HD = Y ADᵀ."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < n_rows
    ranks, down = tl.arange(0, R), tl.arange(0, RD)
    h_gate = tall(H, rows, ranks, there, RANK, H_STRIDE)
    h_up = tall(H + UP_AT, rows, ranks, there, RANK, H_STRIDE)
    hd = tl.zeros((ROWS, RD), tl.float32)
    row = rows.to(tl.int64)[:, None] * WIDTH
    for start in tl.range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        within = cols < WIDTH
        inside = there[:, None] & within[None, :]
        gate = tl.load(X + 2 * row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        up = tl.load(X + 2 * row + WIDTH + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        b_gate = tall(BG, cols, ranks, within, RANK, RANK)
        b_up = tall(BU, cols, ranks, within, RANK, RANK)
        gate += tl.dot(h_gate, tl.trans(b_gate)) * scale_gate
        up += tl.dot(h_up, tl.trans(b_up)) * scale_up
        act, _ = activated(gate, ACTIVATION)
        y = (act * up).to(Y.dtype.element_ty)
        tl.store(Y + row + cols[None, :], y, mask=inside)
        hd += tl.dot(y, tl.trans(flat(AD, down, cols, within, DOWN, WIDTH)))
    places = HD + rows.to(tl.int64)[:, None] * DOWN + down[None, :]
    tl.store(places, hd.to(HD.dtype.element_ty), mask=there[:, None] & (down < DOWN)[None, :])


@triton.jit(do_not_specialize=["n_rows"])
def gated_backward_kernel(
    X, H, BG, BU, AD, DY, UD, U, n_rows, scale_gate, scale_up,
    WIDTH: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, UP_AT: tl.constexpr, H_STRIDE: tl.constexpr,
    DOWN: tl.constexpr, RD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """DY is the gradient that comes through the frozen product; the adapter's part, UD AD, is added here. In place: the
    gradients of gate and up over X, the forward result over DY. U: what reaches the inner side of the adapters of gate
    and up, their gradients times BG and BU."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < n_rows
    ranks, down = tl.arange(0, R), tl.arange(0, RD)
    h_gate = tall(H, rows, ranks, there, RANK, H_STRIDE)
    h_up = tall(H + UP_AT, rows, ranks, there, RANK, H_STRIDE)
    ud = tall(UD, rows, down, there, DOWN, DOWN)
    u_gate = tl.zeros((ROWS, R), tl.float32)
    u_up = tl.zeros((ROWS, R), tl.float32)
    row = rows.to(tl.int64)[:, None] * WIDTH
    for start in tl.range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        within = cols < WIDTH
        inside = there[:, None] & within[None, :]
        gate = tl.load(X + 2 * row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        up = tl.load(X + 2 * row + WIDTH + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        b_gate = tall(BG, cols, ranks, within, RANK, RANK)
        b_up = tall(BU, cols, ranks, within, RANK, RANK)
        gate += tl.dot(h_gate, tl.trans(b_gate)) * scale_gate
        up += tl.dot(h_up, tl.trans(b_up)) * scale_up
        dy += tl.dot(ud, flat(AD, down, cols, within, DOWN, WIDTH))
        act, slope = activated(gate, ACTIVATION)
        d_gate = (dy * up * slope).to(X.dtype.element_ty)
        d_up = (dy * act).to(X.dtype.element_ty)
        tl.store(X + 2 * row + cols[None, :], d_gate, mask=inside)
        tl.store(X + 2 * row + WIDTH + cols[None, :], d_up, mask=inside)
        tl.store(DY + row + cols[None, :], (act * up).to(DY.dtype.element_ty), mask=inside)
        u_gate += tl.dot(d_gate, b_gate)
        u_up += tl.dot(d_up, b_up)
    u_gate, u_up = u_gate * scale_gate, u_up * scale_up
    kept = there[:, None] & (ranks < RANK)[None, :]
    places = U + rows.to(tl.int64)[:, None] * H_STRIDE + ranks[None, :]
    if UP_AT == 0:
        tl.store(places, (u_gate + u_up).to(U.dtype.element_ty), mask=kept)
    else:
        tl.store(places, u_gate.to(U.dtype.element_ty), mask=kept)
        tl.store(places + UP_AT, u_up.to(U.dtype.element_ty), mask=kept)


settle_keys(globals())
