"""The Triton half of `swiglu`. Programs take a column block of a chunk of rows; fp32 inside, rounded once."""

import triton
import triton.language as tl

from automodel.kernels.bias_gelu_triton import cdf, gelu_slope, tile_of
from automodel.kernels.triton_keys import settle_keys


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    """(act(z), its slope)."""
    if ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-z))
        return z * s, s * (1.0 + z * (1.0 - s))
    else:
        phi, bell = cdf(z, ACTIVATION == "gelu_tanh")
        return z * phi, gelu_slope(z, phi, bell, ACTIVATION == "gelu_tanh")


@triton.jit(do_not_specialize=["n_rows"])
def swiglu_forward_kernel(
    X, Y, n_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr
):
    """X is (rows, 2·WIDTH), the gate half first; Y is (rows, WIDTH)."""
    cols, rows = tile_of(WIDTH, BLOCK, ROWS)
    inside = (rows < n_rows)[:, None] & (cols < WIDTH)[None, :]
    row = rows.to(tl.int64)[:, None] * WIDTH
    gate = tl.load(X + 2 * row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + 2 * row + WIDTH + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    act, _ = activated(gate, ACTIVATION)
    tl.store(Y + row + cols[None, :], (act * up).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def swiglu_backward_kernel(
    X, DY, n_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """In place: the gradients of both halves over X, and (AGAIN) the forward result over DY. A program reads all it
    needs before it writes, and nobody else reads its elements."""
    cols, rows = tile_of(WIDTH, BLOCK, ROWS)
    inside = (rows < n_rows)[:, None] & (cols < WIDTH)[None, :]
    row = rows.to(tl.int64)[:, None] * WIDTH
    gate = tl.load(X + 2 * row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + 2 * row + WIDTH + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(DY + row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    act, slope = activated(gate, ACTIVATION)
    tl.store(X + 2 * row + cols[None, :], (dy * up * slope).to(X.dtype.element_ty), mask=inside)
    tl.store(X + 2 * row + WIDTH + cols[None, :], (dy * act).to(X.dtype.element_ty), mask=inside)
    if AGAIN:
        tl.store(DY + row + cols[None, :], (act * up).to(DY.dtype.element_ty), mask=inside)


settle_keys(globals())
